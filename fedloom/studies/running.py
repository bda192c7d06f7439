"""Execution of table cells: resumable, with a time limit that stops runs with a checkpoint, and several at once."""

import shlex
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import IO, TypeVar

from fedloom.config.loading import is_free
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.experiment.lock import holder
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.run_folder import finished
from fedloom.runs.parallel import Process, fedloom_process, keep_busy
from fedloom.runs.run import run
from fedloom.studies.code import fingerprint
from fedloom.studies.outcome import note_code, note_machine, reset_gpu_memory, result_of
from fedloom.studies.plan import StudyPlan, recipe_of, result_path, start_recipe
from fedloom.studies.results import BESIDE, CellResult, find, read, store
from fedloom.studies.table import SUFFIX, Cell, cells_of, load_table, table_names

SAME = "the same command"
"""How to resume a stopped run, for messages."""

Work = TypeVar("Work")
Watch = Callable[[Recipe], Callable[[RoundRecord], None]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: a result, or the round after which it was stopped."""

    result: CellResult | None
    round: int
    rounds: int


def run_cells(cells: list[Cell], plan: StudyPlan, watch: Watch | None = None) -> Outcome:
    """Start or resume one run, and store its result when it has finished, unless it is a trial.

    Args:
        cells: The cells that the run provides figures for.
        plan: How to run them.
        watch: Called with the recipe; returns a function that is called with the record of each round.

    Returns:
        The result, or the round after which the run was stopped by the plan's deadline.

    Raises:
        Interrupted: After a signal; the run has written a checkpoint.
    """
    cell = cells[0]
    recipe, is_trial = recipe_of(cell, plan)
    kept = result_path(cell, plan)
    if (known := find(kept)) is not None and not is_trial and not plan.again:
        result = read(known)
        return Outcome(result, result.rounds, result.rounds)
    assert recipe.out is not None
    if plan.again and finished(recipe.out):
        _set_aside(recipe.out)
    if (start := start_recipe(cell, plan)) is not None and not _pretrain(start, plan):
        return Outcome(None, 0, recipe.training.rounds)
    reset_gpu_memory()
    rounds = _Rounds(plan, recipe, watch(recipe) if watch else None, fingerprint(cell.values))
    try:
        run(recipe, on_round=rounds, resume=True)
    except Interrupted as stopped:
        if not rounds.timed_out:
            raise Interrupted(stopped.when, SAME, stopped.signal) from None
        return Outcome(None, rounds.round, recipe.training.rounds)
    result = result_of(recipe.out, _sharing(cell), recipe, plan.changes(cell))
    if is_trial:
        result = replace(result, changes=result.changes | {p: v for p, v in plan.trial.items() if not is_free(p)})
    else:
        store(result, kept)
    return Outcome(result, result.rounds, result.rounds)


def _pretrain(recipe: Recipe, plan: StudyPlan) -> bool:
    """Train the model that cells start from, unless it is there; wait if another process trains it.

    Returns:
        Whether the model is there; False if the plan's deadline has passed before.
    """
    assert recipe.out is not None
    rounds = _Rounds(plan, recipe, None, {})
    while finished(recipe.out) is None:
        try:
            run(recipe, on_round=rounds, resume=True)
        except Interrupted as stopped:
            if not rounds.timed_out:
                raise Interrupted(stopped.when, SAME, stopped.signal) from None
            return False
        except UserError:
            if holder(recipe.out) != "alive" and finished(recipe.out) is None:
                raise
            if plan.left <= 0:
                return False
            sleep(1)
    return True


def _set_aside(folder: Path) -> None:
    """Rename a folder to the first free name of `….1`, `….2` and so on."""
    folder.rename(next(place for n in count(1) if not (place := folder.with_name(f"{folder.name}.{n}")).exists()))


class _Rounds:
    """Callback for each round: records machine and code, stops the run if the next round would miss the deadline."""

    def __init__(
        self, plan: StudyPlan, recipe: Recipe, on_round: Callable[[RoundRecord], None] | None, code: dict[str, str]
    ):
        self.plan, self.recipe, self.on_round, self.code = plan, recipe, on_round, code
        self.round, self.timed_out, self._last = 0, False, monotonic()

    def __call__(self, record: RoundRecord) -> None:
        """Handle a finished round."""
        if self.round == 0 and self.recipe.out:
            note_machine(self.recipe.out, self.recipe)
        if record["round"] == 1 and self.recipe.out:
            note_code(self.recipe.out, self.code)
        if self.on_round:
            self.on_round(record)
        took, self._last = monotonic() - self._last, monotonic()
        self.round = record["round"]
        if self.plan.left < took and not self.timed_out and self.round < self.recipe.training.rounds:
            self.timed_out = True
            signal.raise_signal(signal.SIGTERM)  # the run writes a checkpoint and stops


def _sharing(cell: Cell) -> list[Cell]:
    """Return the cells of all the paper's tables that share a cell's run, this cell first."""
    tables = [cell.table] if cell.table.endswith(SUFFIX) else table_names([cell.paper])
    others = [other for name in tables for other in cells_of(name, load_table(name)) if other.key == cell.key]
    return [cell, *others]


def next_in_time(waiting: deque[Work], plan: StudyPlan, tell: Callable[[str], None]) -> Work | None:
    """Remove the next run from a queue and return it; None if none is left, or the plan's deadline has passed."""
    if waiting and plan.left <= 0:
        runs = "1 run was" if len(waiting) == 1 else f"{len(waiting)} runs were"
        tell(f"time is up: {runs} not started")
        waiting.clear()
    return waiting.popleft() if waiting else None


def start(arguments: Sequence[str], parallel: int, plan: StudyPlan, log: IO[bytes] | None = None) -> Process:
    """Start a `fedloom` command as one of `parallel` processes, with the time that is left until the deadline."""
    limit = [] if plan.deadline is None else ["--limit-seconds", f"{plan.left:.0f}"]
    return fedloom_process([*arguments, *limit], parallel, log, {BESIDE: str(parallel)})


def run_side_by_side(
    commands: Sequence[Sequence[str]], parallel: int, plan: StudyPlan, interrupts: Interrupts,
    tell: Callable[[str], None],
) -> int:  # fmt: skip
    """Run `fedloom` commands in separate processes, `parallel` at a time; none is started after the deadline.

    Args:
        commands: The arguments of each command.
        parallel: Number of concurrent processes.
        plan: The plan with the deadline.
        interrupts: Received signals, forwarded to the processes.
        tell: Called with each message.

    Returns:
        The exit code of the first command that failed, or 0.

    Raises:
        Interrupted: After a signal, when all processes have stopped.
    """
    waiting, ended = deque(commands), list[int]()
    parallel = min(parallel, len(waiting))

    def begin() -> Process | None:
        arguments = next_in_time(waiting, plan, tell)
        return None if arguments is None else start(arguments, parallel, plan)

    def end(process: Process) -> None:
        ended.append(process.returncode)
        if process.returncode and interrupts.asked is None:
            tell(f"exit code {process.returncode}: {shlex.join(process.args)}")  # type: ignore[arg-type]

    keep_busy(begin, parallel, interrupts, end)
    if interrupts.asked is not None and (waiting or any(ended)):
        raise Interrupted("stopped", SAME, interrupts.asked)
    failed = next(filter(None, ended), 0)
    return failed if failed >= 0 else 128 - failed  # ended by a signal: the exit code that a shell reports
