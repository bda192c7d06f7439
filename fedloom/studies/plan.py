"""How cells of the papers' tables are run: seed, shortening, deadline, run folder and results."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from fedloom.config.loading import assign, is_free
from fedloom.studies.results import default_folder
from fedloom.studies.table import RUNS, Cell, final_model, recipe_key, run_name

if TYPE_CHECKING:
    from fedloom.config.recipe import Recipe

KEPT: dict[str, Any] = {
    "storage.personal_models": False, "storage.checkpoint_every": 25, "storage.final_checkpoint": False,
}  # fmt: skip
"""Personal models are not needed, and runs are not extended. Few checkpoints suffice, since stopping a run always
writes one."""


@dataclass(frozen=True)
class StudyPlan:
    """How cells are run: seed, shortening, deadline and where results are stored."""

    seed: int = 0
    shortened: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a smaller setting, by path; stored with the results."""
    scale: float = 1.0
    """Fraction of the rounds."""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a trial, by path. Results of a trial are not stored if these fields affect the figures."""
    results: Path = field(default_factory=default_folder)
    """Folder of new results; those of the package are always read."""
    deadline: float | None = None
    """Value of `time.monotonic()` after which no run is started or continued."""
    again: bool = False
    """Whether to run cells again whose result is stored; a finished run folder is renamed first."""

    def changes(self, cell: Cell) -> dict[str, Any]:
        """Return the fields that differ from the cell's recipe."""
        changes = dict(self.shortened)
        if self.scale != 1:
            rounds = changes.get("training.rounds", cell.rounds)
            changes["training.rounds"] = max(1, round(rounds * self.scale))
        return {path: value for path, value in changes.items() if value != _field(cell.values, path)}

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - monotonic()


def runs_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells by the run that provides their figures."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell.key, []).append(cell)
    return list(runs.values())


def result_path(cell: Cell, plan: StudyPlan) -> Path:
    """Return the file that the result of a cell's run is stored in."""
    return plan.results / cell.paper / f"{run_name(cell.changed(plan.changes(cell)), plan.seed)}.json"


def values_of(cell: Cell, plan: StudyPlan) -> dict[str, Any]:
    """Return the values of a cell's recipe as the plan runs it, before validation."""
    values = cell.changed(plan.changes(cell))
    for path, value in (KEPT | dict(plan.trial)).items():
        assign(values, path, value)
    return values


def recipe_of(cell: Cell, plan: StudyPlan) -> tuple["Recipe", bool]:
    """Return the recipe of a cell with its run folder, and whether it is a trial.

    It is a trial if the plan sets fields that the cell's figures depend on.
    """
    from fedloom.config.recipe import Recipe  # imports torch, which listing tables does not need

    values = values_of(cell, plan)
    is_trial = recipe_key(values) != recipe_key(cell.changed(plan.changes(cell)))
    folder = RUNS / cell.paper / ("trial" if is_trial else "") / run_name(values, plan.seed)
    return Recipe.parse(values | {"seed": plan.seed, "out": str(folder)}), is_trial


def start_recipe(cell: Cell, plan: StudyPlan) -> "Recipe | None":
    """Return the recipe of the run whose final model a cell starts from, with its run folder; None without.

    It is the same for all seeds and shortenings. Of a trial's fields it has those that do not affect figures.
    """
    from fedloom.config.recipe import Recipe

    if cell.start is None:
        return None
    values: dict[str, Any] = deepcopy(dict(cell.start))
    for path, value in (KEPT | {path: value for path, value in plan.trial.items() if is_free(path)}).items():
        assign(values, path, value)
    return Recipe.parse(values | {"seed": 0, "out": str(final_model(cell.paper, cell.start).parents[1])})


def _field(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
