"""`fedloom report`, `watch`: the page of a run or a comparison."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.base import app, err, out, show_json
from fedloom.cli.options import Json
from fedloom.report.page.insight import POINTS, Insights
from fedloom.report.page.page import page_of, write
from fedloom.report.page.runs import entries_of, read_runs

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or the folder of a comparison.")]


@app.command()
def report(
    runs: Runs,
    to: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("report.html"),
    points: Annotated[int, typer.Option("--points", min=0, help="Samples of a t-SNE; 0 leaves them out.")] = POINTS,
    as_json: Json = False,
) -> None:
    """Write one HTML file about a run or a comparison: curves, table, clients, classes, representations, costs.

    It needs no network and nothing beside it. Runs that are not finished are shown as far as they have come.

    Examples:

      fedloom report runs/20250101-120000-compare

      fedloom report runs/a runs/b --out a-and-b.html --png figures
    """
    entries = entries_of(read_runs(runs))
    insights = Insights(points, tell=lambda text: err.print(text, highlight=False, markup=False))
    page = page_of(entries, insights.of(entries))
    write(page, to)
    if as_json:
        show_json({"report": str(to)})
    else:
        out.print(f"report: {to}", highlight=False, markup=False, soft_wrap=True)
