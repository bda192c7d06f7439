"""`fedloom reproduce --queue`: run a queue of table cells, or print its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table as Grid

from fedloom.cli import study_data, study_output
from fedloom.cli.base import err, out, say, show_json, showing_progress
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupts

if TYPE_CHECKING:
    from fedloom.studies.plan import StudyPlan
    from fedloom.studies.queue import Queue, State
    from fedloom.studies.queue_running import EntryStatus, Failure

    Source = str | Queue
    """A queue, or its file or name."""

STATES: tuple[State, ...] = ("done", "running", "stopped", "failed", "waiting")


def refuse(given: Mapping[str, object], option: str, what: str) -> None:
    """Raise a UserError if an option was given that another option does not allow.

    Args:
        given: Values of options by their names.
        option: The other option.
        what: What the other option does.
    """
    if names := [name for name, value in given.items() if value]:
        raise UserError(f"{names[0]}: cannot be combined with {option}, which {what}; leave out {names[0]} or {option}")


def run(
    source: Source, plan: StudyPlan, parallel: int, *, only_status: bool, dry_run: bool, as_json: bool,
    carry: Path | None = None, otherwise: str = "run it without --queue",
) -> None:  # fmt: skip
    """Run a queue and print its status.

    Args:
        source: A queue file, the name of a shipped queue, or a queue.
        plan: Results folder, deadline and fields such as the data folder; the entries define the rest.
        parallel: Runs at a time.
        only_status: Print the status without running anything.
        dry_run: Print each run's command and recipe without running anything.
        as_json: Print JSON instead of a table.
        carry: Archive of results and unfinished runs: read before the queue if it exists, written whenever a run ends.
        otherwise: What to do instead of setting a field that changes the figures.
    """
    from fedloom.config.loading import is_free
    from fedloom.studies.carry import pack
    from fedloom.studies.queue import distinct, load_queue
    from fedloom.studies.queue_running import run_queue, status

    if fixed := [path for path in plan.trial if not is_free(path)]:
        raise UserError(f"--set {fixed[0]}: changes the figures, which are stored as those of the recipe; {otherwise}")
    waiting = load_queue(source) if isinstance(source, str) else source
    entries = waiting.runs(plan)
    runs = distinct(entries)
    if dry_run:
        for one in runs:
            study_output.show_plan(one.plan, one.cells)
        return
    failures: list[Failure] = []
    missing: study_data.Missing = {}
    if not only_status:
        if carry is not None:
            if carry.exists():
                _unpack(carry, plan)
            pack(carry, runs)  # if the file cannot be written, nothing is run
        ready, missing = study_data.split([(one.plan, list(one.cells)) for one in runs])
        study_data.show(missing)
        plans = {id(plan) for plan, _ in ready}
        ready_runs = [one for one in runs if id(one.plan) in plans]

        def tell(text: str) -> None:
            say(text, err)
            if carry is not None:
                pack(carry, runs)

        with showing_progress(), Interrupts() as interrupts:
            try:
                failures = run_queue(ready_runs, parallel, plan, interrupts, tell)
            finally:
                if carry is not None:
                    say(f"carry: {carry}, {pack(carry, runs) / 1e6:.1f} MB", err)
    found, machine = status(entries, plan.results)
    if as_json:
        show_json({"queue": waiting.name, "machine": machine, "entries": [_as_json(one) for one in found]})
    else:
        _show(waiting.name, found, machine)
    for failure in failures:
        say(f"\nfailed with exit code {failure.exit_code}: {failure.command}\nlog: {failure.log}", err)
        say(failure.last_lines, err)
    if failures:
        code = failures[0].exit_code
        raise typer.Exit(code if code > 0 else 128 - code)  # killed by a signal: the shell's convention
    if missing:
        raise typer.Exit(2)


def _unpack(file: Path, plan: StudyPlan) -> None:
    from fedloom.studies.carry import unpack

    results, unfinished = unpack(file, plan.results)
    say(f"carry: {file}: restored {results} results and {unfinished} unfinished runs", err)


def _show(source: str, found: Sequence[EntryStatus], machine: str) -> None:
    from fedloom.studies.queue_running import time_left

    grid = Grid(title=f"queue {source}", title_justify="left")
    for head in ("entry", "runs", "state", "time left"):
        grid.add_column(head, justify="right" if head in ("runs", "time left") else "left")
    for one in found:
        states = ", ".join(f"{number} {state}" for state in STATES if (number := one.count(state)))
        grid.add_row(one.entry.name, str(len(one.runs)), states, _time(one))
    out.print(grid)
    say(time_left(found, machine))
    for one in found:
        for run, state in one.runs:
            if state == "failed":
                say(f"failed in {one.entry.name}: {run.failure}")


def _time(one: EntryStatus) -> str:
    from fedloom.studies.workload import duration_in_words

    more = f" + {one.unknown} unknown" if one.unknown else ""
    return duration_in_words(one.seconds) + more if one.seconds else more.removeprefix(" + ")


def _as_json(one: EntryStatus) -> dict[str, Any]:
    from fedloom.studies.queue_running import described

    counts: dict[str, int] = {state: one.count(state) for state in STATES}
    left = [
        {
            "run": described(run), "state": state, "round": run.round, "rounds": run.recipe.training.rounds,
            "folder": str(run.recipe.out), "result": str(run.result),
            **({"log": str(run.failure)} if state == "failed" else {}),
        }
        for run, state in one.runs
        if state != "done"
    ]  # fmt: skip
    return {
        "name": one.entry.name, "what": one.entry.what, "tables": one.entry.table, "seeds": one.entry.seeds,
        "runs": len(one.runs), **counts, "image_steps_left": one.steps, "seconds_left": one.seconds,
        "runs_of_unknown_speed": one.unknown, "left": left,
    }  # fmt: skip
