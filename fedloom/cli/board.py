"""`fedloom board`: leaderboards of methods over datasets and divisions, with their cost."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as Grid

from fedloom.cli import flags, study_queue
from fedloom.cli.base import app, out, say, show_json
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedloom.studies.board import Standing
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.results import CellResult
    from fedloom.studies.schema import Table
    from fedloom.studies.table import Cell

PFLLIB = "pfllib/board"
PAGES = {PFLLIB: Path("docs/board.md"), "digits/board": Path("docs/board-digits.md")}
"""Pages of the shipped boards."""
SHOWN = ("best, all samples", "last, all samples", "last, mean", "spread", "worst tenth", "MB up", "s/round")
"""Measures that are printed; the page has all."""


@app.command()
def board(
    name: Annotated[
        str, typer.Argument(metavar="[BOARD]", help="A board: a YAML file, pfllib/board or digits/board.")
    ] = PFLLIB,
    run: Annotated[bool, typer.Option("--run", help="Run what is missing, in the order of the queue.")] = False,
    queue: Annotated[
        str | None, typer.Option("--queue", help="Queue to run; default: board for pfllib/board, else all cells.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Print what is done and what is left.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --run: print each run's command and recipe; run nothing.")
    ] = False,
    parallel: flags.Parallel = 1,
    limit_seconds: flags.LimitSeconds = None,
    engine: flags.Engine = None, data_dir: flags.DataDir = None, set_: flags.Set = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder for new results; default: ./reproduction, for shipped boards in a checkout the package's.",
        ),
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Write the board as Markdown.")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File of --page; default: the board's page in docs; for your own board BOARD.md."),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the board as HTML with sortable tables.")] = None,
    trust_code: flags.TrustCode = False, as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Show a leaderboard: accuracy, spread, bytes, seconds and memory of each method, next to published figures.

    Without options, the stored results are shown. A board is a recipe: datasets, divisions, methods and seeds (see
    docs/how-to/board.md). Runs can be resumed (runs/reproduce); results are stored as small files (--results).

    Examples:

      fedloom board                                # PFLlib's leaderboard, its figures next to ours

      fedloom board --run --parallel 6 --limit-seconds 3000 --data-dir ~/data

      fedloom board --status

      fedloom board digits/board                   # all methods on digits, run on a CPU

      fedloom board --page --html board.html       # writes docs/board.md and a page with sortable tables

      fedloom board mine.yaml --run --page         # your own board; writes mine.md
    """
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.results import default_folder, stored
    from fedloom.studies.table import cells_of, load_table, study_of

    began = monotonic()
    if to is not None and not page:
        raise UserError(f"--to {to}: is the file of --page; add --page")
    if not run:
        _refuse_without_run({
            "--dry-run": dry_run, "--parallel": parallel != 1, "--limit-seconds": limit_seconds is not None,
            "--engine": engine, "--set": set_,
        })  # fmt: skip
    folder = results or default_folder([name])
    table = load_table(name)
    cells = cells_of(name, table)
    fields = flags.fields_of(set_, **{"engine.name": engine, "data.dir": None if data_dir is None else str(data_dir)})
    deadline = None if limit_seconds is None else began + limit_seconds
    if run or status:
        plan = StudyPlan(trial=fields, results=folder, deadline=deadline)
        study_queue.run(
            _queue(name, table, queue), plan, parallel, only_status=not run, dry_run=dry_run, as_json=as_json,
            otherwise="write it in the recipe of your own board (docs/how-to/board.md)",
        )  # fmt: skip
        if status or dry_run or as_json:
            return
    found = stored(folder, study_of(name))
    if page:
        from fedloom.studies.board_page import markdown

        rest = _rest(_queue(name, table, queue), StudyPlan(results=folder))
        _write(to or _page_of(name), markdown(name, table, cells, found, rest))
    if html is not None:
        from fedloom.report.page.page import refuse_unwritable, write
        from fedloom.studies.board_page import page as page_of

        refuse_unwritable(html, "--html", "board.html")
        write(page_of(table, cells, found), html)
        say(f"written: {html}")
    if as_json:
        from fedloom.studies.board import standings

        show_json({"board": name, "standings": [_as_json(one) for one in standings(cells, found)]})
    elif not page and html is None:
        _show(table, cells, found, [] if results is None else ["--results", str(results)])


def _refuse_without_run(given: Mapping[str, object]) -> None:
    if names := [name for name, value in given.items() if value]:
        raise UserError(f"{names[0]}: only affects runs; add --run")


def _page_of(name: str) -> Path:
    """Return the file of the page: in docs for a shipped board, else the board's name with .md."""
    return PAGES.get(name, Path(Path(name).stem + ".md"))


def _rest(queue: study_queue.Source, plan: StudyPlan) -> str:
    """Say how many runs of a queue remain and how long they take; empty if none remain."""
    from fedloom.studies.queue import load_queue
    from fedloom.studies.queue_running import status, time_left

    found, machine = status((load_queue(queue) if isinstance(queue, str) else queue).runs(plan), plan.results)
    left = sum(len(one.runs) - one.count("done") for one in found)
    return f"{left} runs of the queue remain; {time_left(found, machine)}" if left else ""


def _queue(name: str, table: Table, queue: str | None) -> study_queue.Source:
    """Return the queue to run: the given or the shipped one, or all cells with the board's seeds."""
    from fedloom.studies.queue import Entry, Queue

    if queue is not None or name == PFLLIB:
        return queue or "board"
    return Queue(name, (Entry(name=table.title, table=(name,), seeds=table.seeds),))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--to {path}: cannot be written: {error.strerror}; for example --to board.md") from None
    say(f"written: {path}")


def _show(table: Table, cells: Sequence[Cell], found: Sequence[CellResult], extra: Sequence[str]) -> None:
    """Print the standings, what other code computed, and what was not run yet. `extra`: arguments of commands."""
    from fedloom.studies.board import order_in_words, published_name, standings, waiting
    from fedloom.studies.code import note

    publisher = published_name(table)
    out.print(f"[bold]{table.title}[/bold]", highlight=False)
    for standing in standings(cells, found):
        measures = [m for m in standing.measures if m.title in SHOWN or m.figure == standing.lines[0].cell.measure]
        grid = Grid(title=standing.title, title_justify="left", box=SIMPLE_HEAD, padding=0)  # narrow: it has 10 columns
        for head in ("method", *([publisher] if publisher else []), *(m.title for m in measures), "seeds"):
            grid.add_column(head, justify="left" if head == "method" else "right", no_wrap=head == "method")
        for line in standing.lines:
            printed = "–" if line.cell.printed is None else f"{line.cell.printed:.2f}"
            texts = [*([printed] if publisher else []), *(measure.text(line) for measure in measures)]
            grid.add_row(line.cell.name, *texts, str(len(line.results)))
        out.print(grid)
        if standing.changes:
            say(f"{standing.changes}; published figures are those of the full setting")
        for text in (*order_in_words(standing), *note(standing.lines, extra)):
            say(text)
    for column, names in waiting(cells, found).items():
        say(f"not run yet on {column}: {names}")


def _as_json(standing: Standing) -> dict[str, object]:
    from fedloom.studies.board import MEASURES, order_in_words
    from fedloom.studies.code import outdated

    methods = [
        {
            "row": line.cell.row,
            "published": line.cell.printed,
            "measure": line.cell.measure,
            "figures": line.figures,
            "seeds": [result.seed for result in line.results],
            "outdated": outdated(line),
        }
        | {measure.title: measure.of(line) for measure in MEASURES}
        for line in standing.lines
    ]
    return {
        "column": standing.column, "rounds": standing.rounds, "seconds": standing.seconds, "methods": methods,
        "order": order_in_words(standing),
    }  # fmt: skip
