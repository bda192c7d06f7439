"""Queues: ordered lists of table cells to run with several seeds, and the state of each run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from fedloom.config.loading import parse_yaml
from fedloom.config.recipe import Recipe
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError, nearest, shown
from fedloom.experiment.lock import holder
from fedloom.studies.plan import StudyPlan, recipe_of, result_path, runs_of
from fedloom.studies.results import find
from fedloom.studies.selection import Selection
from fedloom.studies.table import RUNS, Cell, load_table

State = Literal["done", "running", "stopped", "failed", "waiting"]
LOGS = RUNS / "logs"


def _as_texts(value: Any) -> Any:
    """Read `a`, `a,b` and `[a, 0.5]` as lists of strings, as the command line does."""
    if isinstance(value, str):
        return value.split(",")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [str(value)]
    return [str(v) if isinstance(v, (int, float)) else v for v in value] if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_texts), Field(min_length=1)]


class Entry(Section):
    """A queue entry: cells to run, selected as on the command line, each with every seed."""

    name: str
    what: str = Field("", description="the question that the runs answer")
    verdict: str = Field("", description="the answer according to the runs so far: confirmed, refuted or open, and why")
    table: Texts = Field(description="a table such as fedcrc/table1, a paper, or a list of them")
    only: Texts | None = Field(None, description="columns with one of these values: [cifar10, mnist]")
    at: dict[str, Texts] = Field(
        {}, description="columns with these values on the axes: {dataset: cifar10, beta: [0.1, 0.5]}"
    )
    methods: Texts | None = Field(None, description="methods (rows of the table); default: all")
    first: bool = Field(False, description="only cells marked to be run first")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    scale: float = Field(1.0, gt=0, le=1, description="fraction of the rounds; stored with the results")
    reduced: bool = Field(False, description="use the table's smaller setting; stored with the results")

    def runs(self, plan: StudyPlan) -> list["QueuedRun"]:
        """Return all runs: all cells with the first seed, then all cells with the next seed, and so on."""
        selection = Selection(self.table, self.only, self.at, self.methods, self.first)
        runs = runs_of(selection.cells())
        return [QueuedRun(tuple(run), self._plan(plan, run[0], seed)) for seed in self.seeds for run in runs]

    def _plan(self, plan: StudyPlan, cell: Cell, seed: int) -> StudyPlan:
        shortened = load_table(cell.table).reduced if self.reduced else {}
        return replace(plan, seed=seed, scale=self.scale, shortened=shortened)


@dataclass(frozen=True)
class QueuedRun:
    """One run of a queue: the cells that it provides figures for, and the plan it is run with."""

    cells: tuple[Cell, ...]
    plan: StudyPlan

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the run, including the run folder."""
        return recipe_of(self.cells[0], self.plan)[0]

    @cached_property
    def result(self) -> Path:
        """The file that the run stores its result in; two runs with the same path are the same run."""
        return result_path(self.cells[0], self.plan)

    @property
    def log(self) -> Path:
        """The file for the output of the run's process while it runs."""
        return LOGS / f"{self.cells[0].paper}-{self.result.stem}.log"

    @property
    def failure(self) -> Path:
        """The file for the output of a failed run; removed when the run is started again."""
        return self.log.with_suffix(".failed.log")

    @property
    def round(self) -> int:
        """The round of the last checkpoint; 0 without a checkpoint."""
        assert self.recipe.out is not None
        names = [path.stem.removeprefix("round-") for path in self.recipe.out.glob("checkpoints/round-*.json")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    @property
    def state(self) -> State:
        """The state of the run, according to the files that it wrote."""
        if find(self.result) is not None:
            return "done"
        assert self.recipe.out is not None
        if holder(self.recipe.out) == "alive":
            return "running"
        if self.failure.exists():
            return "failed"
        return "stopped" if self.round else "waiting"


@dataclass(frozen=True)
class Queue:
    """A queue: entries in the order in which they are run."""

    name: str
    entries: tuple[Entry, ...]

    def runs(self, plan: StudyPlan) -> list[tuple[Entry, list[QueuedRun]]]:
        """Return the runs of each entry.

        Raises:
            UserError: If an entry selects no cells, or names an unknown table or method.
        """
        found = []
        for number, entry in enumerate(self.entries, 1):
            try:
                found.append((entry, entry.runs(plan)))
            except UserError as error:
                raise UserError(f"queue '{self.name}', entry {number} ({entry.name}): {error}") from None
        return found


def distinct(entries: Iterable[tuple[Entry, Sequence[QueuedRun]]]) -> list[QueuedRun]:
    """Return all runs in order; a run that several entries select appears only in its first position."""
    found: dict[Path, QueuedRun] = {}
    for run in (run for _, runs in entries for run in runs):
        found.setdefault(run.result, run)
    return list(found.values())


def shipped_queues() -> dict[str, Traversable]:
    """Return the queues that are part of the package, by name."""
    folder = files("fedloom") / "studies" / "queues"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): entry for entry in sorted(found, key=lambda entry: entry.name)}


def load_queue(source: str) -> Queue:
    """Read a queue.

    Args:
        source: A file, or the name of a shipped queue: `decisive`, `tables`, `board`.

    Raises:
        UserError: If the file cannot be read, or is not a list of entries.
    """
    known = shipped_queues()
    path: Path | Traversable = known[source] if source in known and not Path(source).is_file() else Path(source)
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"queue '{source}' cannot be read: {reason}; {nearest(source, known)}, or a file") from None
    except yaml.YAMLError as error:
        raise UserError(f"queue '{source}' is not YAML: {error!s:.600}; write a list of entries") from None
    if not isinstance(values, list) or not values:
        raise UserError(
            f"queue '{source}' = {shown(values)}: must be a list of entries; for example "
            "- {name: one, table: fedcrc/table1, methods: [fedavg]}"
        )
    try:
        return Queue(source, tuple(checked(Entry, entry, f"entry {n}") for n, entry in enumerate(values, 1)))
    except UserError as error:
        raise UserError(f"queue '{source}': {error}") from None
