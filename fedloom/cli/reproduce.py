"""`fedloom reproduce`: run the papers' tables and compare with the published figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import flags, study_data, study_output, study_queue
from fedloom.cli.base import app, err, say, show_json, showing_progress
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupts

if TYPE_CHECKING:
    from fedloom.cli.study_data import Missing, Run
    from fedloom.studies.comparison import Line
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.results import CellResult
    from fedloom.studies.table import Cell

Names = Annotated[list[str] | None, typer.Argument(metavar="TABLE", help="Tables or papers: repper/table2, fedcrc.")]


@app.command()
def reproduce(
    tables: Names = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Select columns that contain one of these values: cifar10,mnist")
    ] = None,
    at: Annotated[list[str] | None, typer.Option("--at", help="Select columns: dataset=cifar10,beta=0.5")] = None,
    alpha: Annotated[str | None, typer.Option("--alpha", help="Short for --at alpha=…")] = None,
    beta: Annotated[str | None, typer.Option("--beta", help="Short for --at beta=…")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Select rows: fedavg,repper")] = None,
    first: Annotated[bool, typer.Option("--first", help="Select the cells with the highest priority.")] = False,
    scale: Annotated[
        float, typer.Option("--scale", help="Fraction of the rounds to run; recorded with the result.")
    ] = 1.0,
    reduced: Annotated[
        bool, typer.Option("--reduced", help="Use the table's reduced setting; recorded with the result.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    engine: flags.Engine = None, data_dir: flags.DataDir = None, set_: flags.Set = None,
    parallel: flags.Parallel = 1,
    limit_seconds: flags.LimitSeconds = None,
    again: Annotated[bool, typer.Option("--again", help="Run cells again even if their results are stored.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder for new results; default: the package's folder in a checkout, else ./reproduction.",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", help="Run a queue: a YAML file, or a shipped one (decisive, tables, board)."),
    ] = None,
    carry: Annotated[
        Path | None,
        typer.Option("--carry", help="With --queue: archive of results and unfinished runs; read first, then written."),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="With --queue: print what is done and what is left.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each cell's command and recipe; run nothing.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List all tables: cells, cost, stored results.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --list: measure training speed here to estimate the time of runs.")
    ] = False,
    report_: Annotated[bool, typer.Option("--report", help="Write the report of all stored results.")] = False,
    figures: Annotated[
        bool, typer.Option("--figures", help="Draw figures from stored results; default: all of the papers' figures.")
    ] = False,
    to: Annotated[
        Path, typer.Option("--to", help="Report file; pages and figures go to a folder of the same name.")
    ] = Path("docs/reproduction.md"),
    trust_code: flags.TrustCode = False, as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Run cells of the five papers' tables and show the published figures next to ours.

    Without arguments, all tables are listed. Results that come with fedloom are shown at once; other cells are run if
    their data are there. Runs can be resumed (runs/reproduce); results are stored as small files (--results). A run
    that --set makes differ from the paper's setting is a trial: its result is printed but not stored.

    Examples:

      fedloom reproduce                            # all tables, with cost and stored results

      fedloom reproduce fedcrc/table1 --beta 0.1   # the paper's figures next to ours

      fedloom reproduce --list --measure             # time the networks on this machine

      fedloom reproduce repper/table2 --only cifar10 --alpha 0.5 --methods fedavg,repper --scale 0.5

      fedloom reproduce fedcrc fedintr/table3 --first --parallel 4 --limit-seconds 500 --data-dir ~/data

      fedloom reproduce --queue decisive --parallel 6 --limit-seconds 1500 --carry back.tar

      fedloom reproduce --queue decisive --status

      fedloom reproduce --report

      fedloom reproduce fedcrl --figures             # draws what is stored in docs/reproduction/figures
    """
    from fedloom.studies.plan import StudyPlan, runs_of
    from fedloom.studies.results import default_folder
    from fedloom.studies.selection import Selection

    began = monotonic()
    results = results or default_folder(tables or ())
    selected = {
        "--only": only, "--at": at, "--alpha": alpha, "--beta": beta, "--methods": methods, "--first": first,
        "--scale": scale != 1, "--reduced": reduced, "--seed": seed, "--again": again, "--list": list_,
    }  # fmt: skip
    if report_ or figures:
        option, what = ("--report", "reports on all results") if report_ else ("--figures", "draws whole tables")
        named = {"TABLE": tables} if report_ else {}
        study_queue.refuse({**named, **selected, "--queue": queue, "--carry": carry}, option, what)
    if report_:
        from fedloom.studies.report import write

        for path in write(results, to):
            say(f"written: {path}")
        return
    if figures:
        study_output.draw_figures(Selection(tables or ["all"]), bool(tables), results, to)
        return
    fields = flags.fields_of(set_, **{"engine.name": engine, "data.dir": None if data_dir is None else str(data_dir)})
    plan = StudyPlan(
        seed=seed, scale=_share(scale), trial=fields, results=results, again=again,
        deadline=None if limit_seconds is None else began + limit_seconds,
    )  # fmt: skip
    if queue is not None:
        study_queue.refuse({"TABLE": tables, **selected}, "--queue", "defines what is run")
        if status or dry_run:
            study_queue.refuse({"--carry": carry}, "--status" if status else "--dry-run", "runs nothing")
        study_queue.run(queue, plan, parallel, only_status=status, dry_run=dry_run, as_json=as_json, carry=carry)
        return
    if carry is not None:
        raise UserError(f"--carry {carry}: only affects queues; add --queue, for example --queue decisive")
    if status:
        raise UserError("--status: name a queue: fedloom reproduce --queue decisive --status")
    list_ = list_ or not (tables or first or dry_run)
    selection = Selection(
        tables or ["all"], None if only is None else only.split(","), _places(at, alpha=alpha, beta=beta),
        None if methods is None else methods.split(","), first,
    )  # fmt: skip
    chosen, cells = selection.load(), selection.cells()
    if list_:
        study_output.show_list(chosen, cells, plan, measure)
        return
    plans = [replace(plan, shortened=chosen[c.table].reduced if reduced else {}) for c in cells]
    runs = [(plans[cells.index(run[0])], run) for run in runs_of(cells)]
    if dry_run:
        for one, run in runs:
            study_output.show_plan(one, run)
        return
    runs, missing = study_data.split(runs)
    found = _run_here(runs, missing) if parallel == 1 else []
    failed = 0 if parallel == 1 else _run_beside(runs, parallel, plan)
    lines = _lines(cells, found, results)
    if as_json:
        show_json(study_output.lines_as_json(lines))
    else:
        study_output.show_lines(chosen, lines)
    study_data.show(missing)
    if failed:
        say("some runs failed: see above", err)
        raise typer.Exit(failed)


def _places(at: Sequence[str] | None, **short: str | None) -> dict[str, set[str]]:
    """Parse `a=1,b=2` into the values that a column must have."""
    places: dict[str, set[str]] = {axis: set(value.split(",")) for axis, value in short.items() if value is not None}
    for pair in (pair for text in at or [] for pair in text.split(",")):
        axis, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--at {pair}: write axis=value, for example --at dataset=cifar10,beta=0.5")
        places.setdefault(axis, set()).add(value)
    return places


def _share(scale: float) -> float:
    if not 0 < scale <= 1:
        raise UserError(f"--scale {scale:g}: must be above 0 and at most 1, the share of the rounds")
    return scale


def _run_here(runs: list[Run], missing: Missing) -> list[CellResult]:
    from fedloom.core.errors import MissingDataError
    from fedloom.studies.report import command
    from fedloom.studies.running import run_cells

    found = []
    for number, (plan, run) in enumerate(runs):
        if number > 0 and plan.left <= 0:  # the first run always starts, so that every call makes progress
            say(f"time limit reached: {len(runs) - number} runs were not started", err)
            break
        try:
            with showing_progress() as start:
                outcome = run_cells(run, plan, start)
        except MissingDataError as error:  # for example, the hub cannot be reached
            study_data.note(missing, error)
            continue
        if outcome.result is None:
            words = f"stopped after round {outcome.round} of {outcome.rounds}; the same command resumes it"
            say(f"{' '.join(command(run[0])[2:])}: {words}", err)
        else:
            found.append(outcome.result)
    return found


def _run_beside(runs: list[Run], many: int, plan: StudyPlan) -> int:
    """Run each command in its own process; results are stored as files. Return the exit code of a failed run, or 0."""
    from fedloom.studies.plan import recipe_of
    from fedloom.studies.queue_running import arguments_of
    from fedloom.studies.running import run_side_by_side

    if any(recipe_of(run[0], one)[1] for one, run in runs):
        raise UserError(
            "--parallel: needs stored results, but with --set of a field that affects the figures they are not stored; "
            "leave out --parallel or --set"
        )
    commands = [arguments_of(run, one) for one, run in runs]
    with showing_progress(), Interrupts() as interrupts:
        return run_side_by_side(commands, many, plan, interrupts, lambda text: say(text, err))


def _lines(cells: list[Cell], found: list[CellResult], results: Path) -> list[Line]:
    """Return the lines of these cells: new results replace stored ones, other seeds are included."""
    from fedloom.studies.comparison import compared, with_other_seeds
    from fedloom.studies.report import chosen_lines
    from fedloom.studies.results import stored

    known = [result for paper in {cell.paper for cell in cells} for result in stored(results, paper)]
    fresh = {line.cell: with_other_seeds(line, known) for line in compared(cells, found) if line.results}
    return [fresh.get(line.cell, line) for line in chosen_lines(cells, results)]
