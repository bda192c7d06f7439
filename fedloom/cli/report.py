"""`fedloom report`, `watch`: the page of a run or a comparison."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import flags
from fedloom.cli.base import app, err, say, show_json

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or the folder of a comparison.")]
POINTS = 400
Points = Annotated[int, typer.Option("--points", min=0, help="Samples of a t-SNE; 0 leaves them out.")]


@app.command()
def report(
    runs: Runs,
    to: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="A folder to write every figure to, as PNG.")] = None,
    points: Points = POINTS,
    as_json: flags.Json = False,
) -> None:
    """Write one HTML file about a run or a comparison: curves, table, clients, classes, representations, costs.

    It needs no network and nothing beside it. Runs that are not finished are shown as far as they have come.

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
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the page; default: a free one.")] = 0,
    points: Points = POINTS,
) -> None:
    """Show the report in a browser and keep it up to date while runs go on; on this machine only.

    Pages reconnect by themselves, and stay when a run ends. Ctrl-C ends it; the runs are not touched.

    Examples:

      fedloom watch runs/20250101-120000-fedcrl-digits-s0

      fedloom watch runs/20250101-120000-compare --port 8000
    """
    from fedloom.report.live import Live
    from fedloom.report.page.insight import Insights
    from fedloom.report.page.runs import read_runs

    read_runs(runs)  # a folder without runs is a mistake
    with Live(runs, port=port, insights=Insights(points)) as live:
        live.stay(lambda: say(f"watching: {live.url} (Ctrl-C ends it)"))


@contextmanager
def live_page(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Serve the page of a run in this process, if a folder is given; yield what to call when the run has ended."""
    if folder is None:
        yield lambda: None
        return
    from fedloom.report.live import Live
    from fedloom.report.page.insight import Insights

    with Live([folder], insights=Insights(unfinished=False)) as live:  # the run has the data in memory already
        say(f"watch it: {live.url}", err)
        yield lambda: live.stay(lambda: say(f"the page stays: {live.url} (Ctrl-C ends it)", err))
