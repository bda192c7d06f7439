"""Runs cells: resumable run folders, a time limit that ends between two rounds with a checkpoint, several at once."""

import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from fedloom.config.loading import assign
from fedloom.config.recipe import Recipe
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.resume import is_free
from fedloom.experiment.run_folder import finished
from fedloom.runs.parallel import Process, fedloom_process, keep_busy
from fedloom.runs.run import run
from fedloom.studies.results import BESIDE, RESULTS, CellResult, note_machine, read, result_of, store
from fedloom.studies.table import Cell, cells_of, load_table, recipe_key, run_name, table_names

RUNS = Path("runs") / "reproduce"
KEPT: dict[str, Any] = {"storage.personal_models": False, "storage.checkpoint_every": 25}
"""Models are not what is wanted; stopping writes a checkpoint anyway, and so does the clock."""

SAME = "the same command"
"""Resumes what was stopped, and stores its result."""

Watch = Callable[[Recipe], Callable[[RoundRecord], None]]


@dataclass(frozen=True)
class StudyPlan:
    """How cells are to be run."""

    seed: int = 0
    shortened: Mapping[str, Any] = field(default_factory=dict)
    """fields of a smaller setting; results say so"""
    scale: float = 1.0
    """share of the rounds"""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """fields for a trial: what differs from the paper's setting is not stored"""
    results: Path = RESULTS
    deadline: float | None = None
    """monotonic time"""
    again: bool = False
    """also run what is stored already, and anew what is finished"""

    def changes(self, cell: Cell) -> dict[str, Any]:
        """What differs from the cell's recipe."""
        changes = dict(self.shortened)
        if self.scale != 1:
            rounds = changes.get("training.rounds", cell.rounds)
            changes["training.rounds"] = max(1, round(rounds * self.scale))
        return {path: value for path, value in changes.items() if value != _field(cell.values, path)}

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - monotonic()


@dataclass(frozen=True)
class Outcome:
    """What became of a run: a result, or the round it was stopped after."""

    result: CellResult | None
    round: int
    rounds: int
    is_trial: bool = False
    stored_before: bool = False


def runs_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells by the run that gives their figures."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell.key, []).append(cell)
    return list(runs.values())


def run_cells(cells: list[Cell], plan: StudyPlan, watch: Watch | None = None) -> Outcome:
    """One run, begun or gone on with; its result is stored when it is finished, unless it is a trial."""
    cell = cells[0]
    recipe, is_trial = recipe_of(cell, plan)
    kept = result_path(cell, plan)
    if kept.exists() and not is_trial and not plan.again:
        result = read(kept)
        return Outcome(result, result.rounds, result.rounds, stored_before=True)
    assert recipe.out is not None
    if plan.again and finished(recipe.out):
        _set_aside(recipe.out)
    rounds = _Rounds(plan, recipe, watch(recipe) if watch else None)
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


def result_path(cell: Cell, plan: StudyPlan) -> Path:
    """Where the result of a cell's run is stored."""
    return plan.results / cell.paper / f"{run_name(cell.changed(plan.changes(cell)), plan.seed)}.json"


def recipe_of(cell: Cell, plan: StudyPlan) -> tuple[Recipe, bool]:
    """With its run folder; and whether it is a trial: fields were set that the cell's figures depend on."""
    values = cell.changed(plan.changes(cell))
    key = recipe_key(values)
    for path, value in (KEPT | dict(plan.trial)).items():
        assign(values, path, value)
    is_trial = recipe_key(values) != key
    folder = RUNS / cell.paper / ("trial" if is_trial else "") / run_name(values, plan.seed)
    return Recipe.parse(values | {"seed": plan.seed, "out": str(folder)}), is_trial


def _set_aside(folder: Path) -> None:
    """Under a name that is free: `….1`."""
    folder.rename(next(place for n in count(1) if not (place := folder.with_name(f"{folder.name}.{n}")).exists()))


class _Rounds:
    """Called after each round: notes which machine it was, and asks the run to stop when another would end too late."""

    def __init__(self, plan: StudyPlan, recipe: Recipe, on_round: Callable[[RoundRecord], None] | None):
        self.plan, self.recipe, self.on_round = plan, recipe, on_round
        self.round, self.is_up, self._last = 0, False, monotonic()

    def __call__(self, record: RoundRecord) -> None:
        """One more round."""
        if self.round == 0 and self.recipe.out:
            note_machine(self.recipe.out, self.recipe)
        if self.on_round:
            self.on_round(record)
        took, self._last = monotonic() - self._last, monotonic()
        self.round = record["round"]
        if self.plan.left < took and not self.is_up and self.round < self.recipe.training.rounds:
            self.is_up = True
            signal.raise_signal(signal.SIGTERM)  # as if asked from outside: a checkpoint, then the end


def _sharing(cell: Cell) -> list[Cell]:
    """Cells of all the paper's tables that have the same run, this one first."""
    tables = (name for name in table_names() if name.startswith(f"{cell.paper}/"))
    others = [other for name in tables for other in cells_of(name, load_table(name)) if other.key == cell.key]
    return [cell, *others]


def run_side_by_side(
    commands: Sequence[Sequence[str]], many: int, plan: StudyPlan, interrupts: Interrupts, tell: Callable[[str], None]
) -> int:
    """Run commands of `fedloom`, each in its own process, `many` at a time; none is started after the deadline.

    Returns:
        The exit code of the first that failed, or 0.
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
    return failed if failed >= 0 else 128 - failed  # by a signal: as a shell has it


def _field(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
