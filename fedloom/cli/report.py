"""`fedloom report`, `watch`, `diff`: the HTML report of a run or comparison, and differences between two runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Grid
from rich.text import Text

from fedloom.cli import flags
from fedloom.cli.base import app, err, out, say, show_json
from fedloom.core.errors import UserError, printable

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN…", help="Run folders, or the folder of a comparison; default: the newest folder in runs."
    ),
]
RUNS = Path("runs")
POINTS = 400
Points = Annotated[int, typer.Option("--points", min=0, help="Number of samples in each t-SNE plot; 0 for none.")]


@app.command()
def report(
    runs: Runs = None,
    to: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the figures as PNG files.")] = None,
    points: Points = POINTS,
    as_json: flags.Json = False,
) -> None:
    """Write the report of a run or comparison: curves, table, clients, classes, representations, costs.

    The report is one HTML file that works offline. Unfinished runs are included up to their last round.

    Examples:

      fedloom report                         # the newest run or comparison in runs

      fedloom report runs/20250101-120000-compare

      fedloom report runs/a runs/b --out a-and-b.html --png figures
    """
    from fedloom.report.page.png import write_pngs
    from fedloom.report.page.report import write_report

    page = write_report(runs or _newest(), to, points=points, tell=lambda text: say(text, err))
    pictures = write_pngs(page, png) if png is not None else []
    if as_json:
        show_json({"report": str(to), "pictures": [str(path) for path in pictures]})
        return
    say(f"report: {to}")
    if png is not None:
        say(f"{len(pictures)} pictures: {png}")


@app.command()
def watch(
    runs: Runs = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to serve on; default: a free one.")] = 0,
    points: Points = POINTS,
) -> None:
    """Serve the report on this machine only and update it while runs train.

    The page reconnects automatically and stays up when a run ends. Ctrl-C stops the server, not the runs.

    Examples:

      fedloom watch                          # the newest run or comparison in runs

      fedloom watch runs/20250101-120000-fedcrl-digits-s0

      fedloom watch runs/20250101-120000-compare --port 8000
    """
    from fedloom.report.live import Live
    from fedloom.report.page.insight import Insights
    from fedloom.report.page.runs import read_runs

    runs = runs or _newest()
    read_runs(runs)  # raises a UserError for a folder without runs
    with Live(runs, port=port, insights=Insights(points)) as live:
        live.stay(lambda: say(f"watching: {live.url} (Ctrl-C stops the server)"))


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of another run.")],
    as_json: flags.Json = False,
) -> None:
    """Show what differs between two runs: recipe, versions, data and figures.

    Examples:

      fedloom diff runs/mine runs/yours

      fedloom diff runs/mine runs/yours --json
    """
    from fedloom.report.diff import brief_value, differences

    found = differences(first, second)
    if as_json:
        show_json(found)
        return
    if not any(found.values()):
        say("the runs are equal: recipe, versions, data and figures")
    for what, pairs in found.items():
        if isinstance(pairs, dict) and pairs:
            grid = Grid(title=what, title_justify="left")
            for head in ("", str(first), str(second)):
                grid.add_column(head, overflow="fold")
            for name, values in pairs.items():
                grid.add_row(*(Text(printable(text)) for text in (name, *(brief_value(v) for v in values))))
            out.print(grid)


def _newest() -> list[Path]:
    """Return the run, comparison or sweep in `runs` whose files changed last, and say which it is."""
    from fedloom.experiment.run_folder import METRICS
    from fedloom.runs.compare import holds_comparison
    from fedloom.runs.sweep import holds_sweep

    files = list(RUNS.glob(f"**/{METRICS}"))
    if not files:
        raise UserError(f"RUN: there is no run in '{RUNS}'; name a run folder, or start one with `fedloom run`")
    run = max(files, key=lambda file: file.stat().st_mtime_ns).parent
    newest = run.parent if holds_comparison(run.parent) or holds_sweep(run.parent) else run
    say(f"newest: {newest}", err)
    return [newest]


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
