"""`fedloom report`, `watch`: the HTML report of a run or comparison."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import flags
from fedloom.cli.base import app, err, say, show_json

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or the folder of a comparison.")]
POINTS = 400
Points = Annotated[int, typer.Option("--points", min=0, help="Number of samples in each t-SNE plot; 0 for none.")]


@app.command()
def report(
    runs: Runs,
    to: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the figures as PNG files.")] = None,
    points: Points = POINTS,
    as_json: flags.Json = False,
) -> None:
    """Write the report of a run or comparison: curves, table, clients, classes, representations, costs.

    The report is one HTML file that works offline. Unfinished runs are included up to their last round.

    Examples:

      fedloom report runs/20250101-120000-compare

      fedloom report runs/a runs/b --out a-and-b.html --png figures
    """
    from fedloom.report.page.insight import Insights
    from fedloom.report.page.page import page_of, refuse_unwritable, write
    from fedloom.report.page.png import write_pngs
    from fedloom.report.page.runs import entries_of, read_runs

    refuse_unwritable(to)
    entries = entries_of(read_runs(runs))
    insights = Insights(points, tell=lambda text: say(text, err))
    page = page_of(entries, insights.of(entries))
    write(page, to)
    pictures = write_pngs(page, png) if png is not None else []
    if as_json:
        show_json({"report": str(to), "pictures": [str(path) for path in pictures]})
        return
    say(f"report: {to}")
    if png is not None:
        say(f"{len(pictures)} pictures: {png}")


@app.command()
def watch(
    runs: Runs,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to serve on; default: a free one.")] = 0,
    points: Points = POINTS,
) -> None:
    """Serve the report on this machine only and update it while runs train.

    The page reconnects automatically and stays up when a run ends. Ctrl-C stops the server, not the runs.

    Examples:

      fedloom watch runs/20250101-120000-fedcrl-digits-s0

      fedloom watch runs/20250101-120000-compare --port 8000
    """
    from fedloom.report.live import Live
    from fedloom.report.page.insight import Insights
    from fedloom.report.page.runs import read_runs

    read_runs(runs)  # raises a UserError for a folder without runs
    with Live(runs, port=port, insights=Insights(points)) as live:
        live.stay(lambda: say(f"watching: {live.url} (Ctrl-C stops the server)"))


@contextmanager
def live_page(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Serve the report of a run in this process if a folder is given; yield the function to call after the run."""
    if folder is None:
        yield lambda: None
        return
    from fedloom.report.live import Live
    from fedloom.report.page.insight import Insights

    with Live([folder], insights=Insights(unfinished=False)) as live:  # the run already holds the data in memory
        say(f"report: {live.url}", err)
        yield lambda: live.stay(lambda: say(f"report: {live.url} (Ctrl-C stops the server)", err))
