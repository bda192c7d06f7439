"""Tables and figures for papers: `fedloom table` and `fedloom figure`."""
