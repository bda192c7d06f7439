"""`fedloom table`, `fedloom figure`: results for a paper."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedloom.cli import flags
from fedloom.cli.base import Group, app, err, say
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from fedloom.report.paper.figures import PaperFigure

Runs = Annotated[list[Path], typer.Argument(metavar="RUNS…", help="Run folders, or folders of comparisons or sweeps.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds to include, comma-separated; default: all.")]


@app.command()
def table(
    runs: Runs,
    format: Annotated[str, typer.Option("--format", help="text, markdown, latex, csv or json.")] = "text",
    measure: Annotated[
        str, typer.Option("--measure", help="Fields of summary.json or metrics.jsonl, comma-separated.")
    ] = "personal_accuracy",
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="Recipe fields that distinguish columns; default: data.name if it differs."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", help="Recipe fields that distinguish rows; default: method, and settings that differ."),
    ] = None,
    seeds: Seeds = None,
    round: Annotated[
        str,
        typer.Option("--round", help="last, or best: by validation samples; without them on test data, which is said."),
    ] = "last",
    interval: Annotated[
        bool, typer.Option("--interval", help="± is the 95% confidence interval, not the sample deviation.")
    ] = False,
    test: Annotated[
        str | None, typer.Option("--test", help="Mark significant differences over clients or seeds (6 or more).")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Row to test the others against; default: the best of its column.")
    ] = None,
    digits: Annotated[int | None, typer.Option("--digits", min=0, max=12, help="Number of decimals.")] = None,
    label: Annotated[str, typer.Option("--label", help="Label of a LaTeX table, for \\ref.")] = "tab:results",
    to: Annotated[Path | None, typer.Option("--to", help="File to write; default: stdout.")] = None,
) -> None:
    """Print a results table of finished runs: methods in rows, mean ± sample standard deviation over seeds.

    The caption says what ± is, which rounds count, and how differences were tested: Wilcoxon's signed-rank test with
    Holm's correction. LaTeX needs the package booktabs; the best of a column is bold, the second is underlined. csv and
    json have unrounded values and p-values.

    Examples:

      fedloom table runs/compared

      fedloom table runs/compared --format latex --test clients --to results.tex

      fedloom table runs/digits runs/mnist --columns data.name --measure personal_accuracy,personal_worst

      fedloom table runs/compared --interval --round best --format markdown
    """
    from fedloom.report.page.page import refuse_unwritable
    from fedloom.runs.table import table

    if to is not None:
        refuse_unwritable(to, "--to", "results.tex")
    options: Any = {"round": round, "test": test}  # names are checked by `table`
    text = table(
        runs, format=format, measures=flags.listed(measure), rows=flags.listed(rows),
        columns=None if columns is None else flags.listed(columns), seeds=flags.read_seeds(seeds), interval=interval,
        against=against, digits=digits, label=label, **options,
    )  # fmt: skip
    if to is None:
        say(str(text))
        return
    to.write_text(f"{text}\n", encoding="utf-8")
    say(f"table: {to}", err)


figure_app = typer.Typer(
    cls=Group, help="Draw figures for a paper: PDF, SVG or PNG, with their data as CSV.", no_args_is_help=True
)
app.add_typer(figure_app, name="figure")
To = Annotated[Path, typer.Option("--to", help="File to write, .pdf, .svg or .png; the data are written beside it.")]
Width = Annotated[str, typer.Option("--width", help="Width on paper: 3.3in, 84mm, 240pt.")]
Height = Annotated[str | None, typer.Option("--height", help="Height on paper; default: by width and methods.")]


@figure_app.command()
def curves(
    runs: Runs,
    to: To = Path("curves.pdf"),
    measure: Annotated[str, typer.Option("--measure", help="Field of metrics.jsonl.")] = "personal_accuracy",
    band: Annotated[
        str, typer.Option("--band", help="Standard deviation to show as a band: over seeds, clients, or none.")
    ] = "seeds",
    width: Width = "3.3in",
    height: Height = None,
    seeds: Seeds = None,
) -> None:
    """Draw learning curves: a line per method, the mean over seeds, labelled at its end.

    Methods differ in colour, dashes and markers. The file has no date in it: the same runs give the same file.

    Examples:

      fedloom figure curves runs/compared --to curves.pdf

      fedloom figure curves runs/compared --to worst.svg --measure personal_worst --width 84mm

      fedloom figure curves runs/compared --to curves.pdf --band clients
    """
    from fedloom.report.paper.figures import Band, draw_curves

    if band not in get_args(Band):
        raise UserError(f"--band {band}: must be one of {', '.join(get_args(Band))}")
    kind: Any = band
    _draw(runs, to, width, height, seeds, lambda entries, canvas: draw_curves(entries, canvas, measure, kind))


@figure_app.command()
def clients(
    runs: Runs,
    to: To = Path("clients.pdf"),
    measure: Annotated[
        str, typer.Option("--measure", help="accuracy, loss or one of evaluation.metrics.")
    ] = "accuracy",
    width: Width = "3.3in",
    height: Height = None,
    seeds: Seeds = None,
) -> None:
    """Draw the results of all clients: a row of dots per method, with the mean and the mean of the worst tenth.

    Examples:

      fedloom figure clients runs/compared --to clients.pdf

      fedloom figure clients runs/compared --to auc.png --measure auc --seeds 0 --width 6.9in
    """
    from fedloom.report.paper.figures import draw_clients

    _draw(runs, to, width, height, seeds, lambda entries, canvas: draw_clients(entries, canvas, measure))


def _draw(
    runs: list[Path], to: Path, width: str, height: str | None, seeds: str | None, draw: Callable[..., "PaperFigure"]
) -> None:
    """Draw a figure, write it and its data, and print a sentence for its caption."""
    from fedloom.report.page.page import refuse_unwritable
    from fedloom.report.page.runs import entries_of
    from fedloom.report.paper.drawing import canvas, refuse_suffix
    from fedloom.report.paper.figures import inches
    from fedloom.report.paper.grid import finished_runs

    refuse_suffix(to)
    refuse_unwritable(to, "--to", "figure.pdf")
    data = to.with_suffix(".csv")
    across, up = inches("--width", width), None if height is None else inches("--height", height)
    entries = entries_of(finished_runs(runs, flags.read_seeds(seeds)))
    with canvas(across, up, len(entries)) as drawing:
        made = draw(entries, drawing)
        refuse_other_figure(to, data, made.csv())
        drawing.save(to)
    data.write_text(made.csv(), encoding="utf-8")
    say(f"figure: {to}\ndata: {data}\ncaption: {made.caption}")


def refuse_other_figure(to: Path, data: Path, text: str) -> None:
    """Raise a UserError if the data file has other data, of another figure: `curves.csv` of `curves.pdf`."""
    from fedloom.report.paper.drawing import SUFFIXES

    others = [data.with_suffix(suffix) for suffix in SUFFIXES if suffix != to.suffix.lower()]
    taken = [other for other in others if other.exists()]
    if data.exists() and taken and data.read_bytes() != text.encode():
        raise UserError(
            f"--to {to}: '{data}' has the data of '{taken[0]}', which differ; choose another name, for example --to "
            f"{to.with_stem(to.stem + '-2')}, or remove '{data}'"
        )
