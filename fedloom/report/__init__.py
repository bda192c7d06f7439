"""Output for people: progress bars, tables, plots and the HTML report."""
