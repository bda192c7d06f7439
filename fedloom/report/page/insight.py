"""What a run's records do not tell: who holds what, and how its models see the data."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.task import Task, group_of_clients
from fedloom.data import Dataset
from fedloom.data.federation import counts
from fedloom.experiment.build import load_dataset, make_task
from fedloom.inference.trained_run import TrainedRun
from fedloom.report.page.maps import Map, Viewer
from fedloom.report.page.runs import Entry, Run

POINTS = 400
"""Of a t-SNE, unless said otherwise."""
GROUPS = 10
"""Styles or domains that colours can tell apart."""


@dataclass
class Holdings:
    """Training samples by client and class."""

    name: str
    classes: list[str]
    counts: list[list[int]]
    newcomers: list[int]
    groups: list[str] = field(default_factory=list)
    """The style or domain of each client, where there are some."""

    @property
    def totals(self) -> dict[int, int]:
        """Training samples by class."""
        return dict(enumerate(np.array(self.counts).sum(0).tolist()))


@dataclass
class Insight:
    """What was found out about a run, and why not more."""

    holdings: Holdings | None = None
    maps: list[Map] = field(default_factory=list)
    styles: list[Map] = field(default_factory=list)
    problem: str = ""


Key = tuple[Path, bool, bool, bool]
"""A run's folder; whether it is finished, its entry's first, and of the only method."""


class Insights:
    """Looks into runs, into each once; data that several runs have in common are loaded once.

    Runs that name Python files without the user's consent are left out: a report runs nobody's code.
    """

    def __init__(
        self, points: int = POINTS, *, unfinished: bool = True, tell: Callable[[str], None] = lambda text: None
    ):
        self.points, self.unfinished, self._tell = points, unfinished, tell
        self._datasets: dict[str, Dataset] = {}
        self._tasks: dict[str, Task] = {}
        self._found: dict[Key, Insight] = {}

    def of(self, entries: Sequence[Entry]) -> dict[Path, Insight]:
        """By run folder. Models are looked at of the first seed; clients one by one where there is one method."""
        for key, run, label in self.missing(entries):
            self._found[key] = self._look(run, label, models=key[2], alone=key[3])
        return self.known(entries)

    def known(self, entries: Sequence[Entry]) -> dict[Path, Insight]:
        """What was found out before."""
        return {run.path: self._found[key] for key, run, _ in _wanted(entries) if key in self._found}

    def missing(self, entries: Sequence[Entry]) -> list[tuple[Key, Run, str]]:
        """What there is still to find out."""
        wanted = [item for item in _wanted(entries) if item[0] not in self._found]
        return [item for item in wanted if self.unfinished or item[1].done is not None]

    def _look(self, run: Run, label: str, *, models: bool, alone: bool) -> Insight:
        insight = Insight()
        if files := trusted_code.not_allowed(run.recipe):
            insight.problem = (
                f"the run of {label} names the Python file {files[0]}, and a report does not import such files: what "
                "needs the network or the data is left out."
            )
            if insight.problem not in (known.problem for known in self._found.values()):
                self._tell(insight.problem)
            return insight
        try:
            trained = TrainedRun(run.path, task=self._task(run))
            insight.holdings = _holdings(trained.task)
            if not models:
                return insight
            if run.done is None:
                raise UserError("the run is not finished, and models are written at its end.")
            if not self.points:
                raise UserError("none was asked for (--points 0).")
            self._tell(f"looking at the representations of {label}")
            viewer = Viewer(trained, [row["client"] for row in run.clients if row["accuracy"] is not None], self.points)
            for found in viewer.together():  # what was found before something is missing stays
                insight.maps.append(found)
            insight.styles = viewer.styles()
            if alone:
                insight.maps += viewer.one_by_one()
        except UserError as error:
            insight.problem = str(error)
        return insight

    def _task(self, run: Run) -> Task:
        data = json.dumps(run.recipe["data"], sort_keys=True, default=str)
        key = f"{data} {run.seed} {run.recipe['model']} {run.recipe.get('objective')}"
        if key not in self._tasks:
            recipe = TrainedRun(run.path).recipe
            if data not in self._datasets:
                self._datasets = {data: load_dataset(recipe)}
            self._tasks[key] = make_task(recipe, self._datasets[data])
        return self._tasks[key]


def _wanted(entries: Sequence[Entry]) -> Iterator[tuple[Key, Run, str]]:
    for entry in entries:
        for run in entry.runs:
            yield (run.path, run.done is not None, run is entry.first, len(entries) == 1), run, entry.label


def _holdings(task: Task) -> Holdings:
    dataset, names = task.dataset, task.dataset.group_names
    groups = [names[group] for group in group_of_clients(task)] if 1 < len(names) <= GROUPS else []
    table = counts(dataset, task.federation)
    return Holdings(dataset.name, list(dataset.classes), table.tolist(), list(task.federation.newcomers), groups)
