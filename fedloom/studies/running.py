"""Execution of table cells: resumable, with a time limit that stops runs with a checkpoint, and several at once."""

import shlex
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic

from fedloom.config.loading import is_free
from fedloom.config.recipe import Recipe
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.run_folder import finished
from fedloom.runs.parallel import Process, fedloom_process, keep_busy
from fedloom.runs.run import run
from fedloom.studies.code import fingerprint
from fedloom.studies.outcome import note_code, note_machine, reset_gpu_memory, result_of
from fedloom.studies.plan import StudyPlan, recipe_of, result_path
from fedloom.studies.results import BESIDE, CellResult, find, read, store
from fedloom.studies.table import SUFFIX, Cell, cells_of, load_table, table_names

SAME = "the same command"
"""How to resume a stopped run, for messages."""

Watch = Callable[[Recipe], Callable[[RoundRecord], None]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: a result, or the round after which it was stopped."""

    result: CellResult | None
    round: int
    rounds: int
    is_trial: bool = False
    stored_before: bool = False


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
        return Outcome(result, result.rounds, result.rounds, stored_before=True)
    assert recipe.out is not None
    if plan.again and finished(recipe.out):
        _set_aside(recipe.out)
    reset_gpu_memory()
    rounds = _Rounds(plan, recipe, watch(recipe) if watch else None, fingerprint(cell.values))
    try:
        run(recipe, on_round=rounds, resume=True)
    except Interrupted as stopped:
        if not rounds.is_up:
            raise Interrupted(stopped.when, SAME, stopped.signal) from None
        return Outcome(None, rounds.round, recipe.training.rounds, is_trial)
    result = result_of(recipe.out, _sharing(cell), recipe, plan.changes(cell))
    if is_trial:
        result = replace(result, changes=result.changes | {p: v for p, v in plan.trial.items() if not is_free(p)})
    else:
        store(result, kept)
    return Outcome(result, result.rounds, result.rounds, is_trial)


def _set_aside(folder: Path) -> None:
    """Rename a folder to the first free name of `….1`, `….2` and so on."""
    folder.rename(next(place for n in count(1) if not (place := folder.with_name(f"{folder.name}.{n}")).exists()))


class _Rounds:
    """Callback for each round: records machine and code, stops the run if the next round would miss the deadline."""

    def __init__(
        self, plan: StudyPlan, recipe: Recipe, on_round: Callable[[RoundRecord], None] | None, code: dict[str, str]
    ):
        self.plan, self.recipe, self.on_round, self.code = plan, recipe, on_round, code
        self.round, self.is_up, self._last = 0, False, monotonic()

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
        if self.plan.left < took and not self.is_up and self.round < self.recipe.training.rounds:
            self.is_up = True
            signal.raise_signal(signal.SIGTERM)  # the run writes a checkpoint and stops


def _sharing(cell: Cell) -> list[Cell]:
    """Return the cells of all the paper's tables that share a cell's run, this cell first."""
    tables = [cell.table] if cell.table.endswith(SUFFIX) else table_names([cell.paper])
    others = [other for name in tables for other in cells_of(name, load_table(name)) if other.key == cell.key]
    return [cell, *others]


def run_side_by_side(
    commands: Sequence[Sequence[str]], many: int, plan: StudyPlan, interrupts: Interrupts, tell: Callable[[str], None]
) -> int:
    """Run `fedloom` commands in separate processes, `many` at a time; none is started after the deadline.

    Args:
        commands: The arguments of each command.
        many: Number of concurrent processes.
        plan: The plan with the deadline.
        interrupts: Received signals, forwarded to the processes.
        tell: Called with each message.

    Returns:
        The exit code of the first command that failed, or 0.

    Raises:
        Interrupted: After a signal, when all processes have stopped.
    """
    waiting, ended = deque(commands), list[int]()
    many = min(many, len(waiting))

    def begin() -> Process | None:
        if waiting and plan.left <= 0:
            tell(f"time is up: {len(waiting)} runs were not started")
            waiting.clear()
        if not waiting:
            return None
        limit = [] if plan.deadline is None else ["--limit-seconds", f"{plan.left:.0f}"]
        return fedloom_process([*waiting.popleft(), *limit], many, own={BESIDE: str(many)})

    def end(process: Process) -> None:
        ended.append(process.returncode)
        if process.returncode and interrupts.asked is None:
            tell(f"exit code {process.returncode}: {shlex.join(process.args)}")  # type: ignore[arg-type]

    keep_busy(begin, many, interrupts, end)
    if interrupts.asked is not None and (waiting or any(ended)):
        raise Interrupted("stopped", SAME, interrupts.asked)
    failed = next(filter(None, ended), 0)
    return failed if failed >= 0 else 128 - failed  # ended by a signal: the exit code that a shell reports
