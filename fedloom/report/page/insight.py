"""Information about runs beyond their records: the clients' data, and representations of their models."""

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
from fedloom.report.page.layers import Layers
from fedloom.report.page.maps import Map, Viewer
from fedloom.report.page.runs import Entry, Run

POINTS = 400
"""Default number of points of a t-SNE."""
GROUPS = 10
"""Largest number of styles or domains that colours can distinguish."""


@dataclass
class Holdings:
    """Numbers of training samples by client and class."""

    name: str
    classes: list[str]
    counts: list[list[int]]
    newcomers: list[int]
    groups: list[str] = field(default_factory=list)
    """The style or domain of each client; empty if the dataset has none."""
    names: list[str] = field(default_factory=list)
    """Names of the clients; empty if they have only numbers."""
    sizes: list[int] = field(default_factory=list)
    """Numbers of training samples of the clients; with several labels per sample, counts add up to more."""

    def size_of(self, client: int) -> int:
        """Return the number of training samples of a client."""
        return self.sizes[client] if self.sizes else sum(self.counts[client])

    def name_of(self, client: int) -> str:
        """Return the name of a client."""
        return self.names[client] if self.names else f"client {client}"

    @property
    def members(self) -> list[int]:
        """The clients, without newcomers."""
        return sorted(set(range(len(self.counts))) - set(self.newcomers))

    @property
    def totals(self) -> dict[int, int]:
        """Numbers of training samples by class, without those of newcomers."""
        return dict(enumerate(np.array(self.counts)[self.members].sum(0).tolist()))


@dataclass
class Insight:
    """What was read from a run's data and models, and the reason if something is missing."""

    holdings: Holdings | None = None
    maps: list[Map] = field(default_factory=list)
    styles: list[Map] = field(default_factory=list)
    layers: Layers | None = None
    problem: str = ""


Key = tuple[Path, bool, bool, bool]
"""A run's folder; whether the run is finished, the first of its entry, and whether there is only one entry."""


class Insights:
    """Reads the data and models of runs, each once; a dataset that several runs share is loaded once.

    Runs that name Python files which the user has not allowed are skipped: a report never runs such code.

    Args:
        points: Number of points of a t-SNE; 0 for none.
        unfinished: Whether to read unfinished runs too.
        tell: Called with each progress message.
    """

    def __init__(
        self, points: int = POINTS, *, unfinished: bool = True, tell: Callable[[str], None] = lambda text: None
    ):
        self.points, self.unfinished, self._tell = points, unfinished, tell
        self._datasets: dict[str, Dataset] = {}
        self._tasks: dict[str, Task] = {}
        self._found: dict[Key, Insight] = {}

    def of(self, entries: Sequence[Entry]) -> dict[Path, Insight]:
        """Read what is not known yet, and return the insights by run folder.

        Models are read only for the first seed of each entry. Single clients are looked at only if there is just one
        entry.
        """
        for key, run, label in self.missing(entries):
            self._found[key] = self._look(run, label, models=key[2], alone=key[3])
        return self.known(entries)

    def known(self, entries: Sequence[Entry]) -> dict[Path, Insight]:
        """Return the insights read so far, by run folder."""
        return {run.path: self._found[key] for key, run, _ in _wanted(entries) if key in self._found}

    def missing(self, entries: Sequence[Entry]) -> list[tuple[Key, Run, str]]:
        """Return the runs whose insights have not been read yet."""
        wanted = [item for item in _wanted(entries) if item[0] not in self._found]
        return [item for item in wanted if self.unfinished or item[1].done is not None]

    def _look(self, run: Run, label: str, *, models: bool, alone: bool) -> Insight:
        insight = Insight()
        if files := trusted_code.not_allowed(run.recipe):
            insight.problem = (
                f"the run of {label} names the Python file {files[0]}, and a report does not import such files. "
                "Figures that need the network or the data are left out."
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
                raise UserError("the run is not finished, and models are saved at its end.")
            if trained.task.dataset.multilabel:
                raise UserError("t-SNE maps colour samples by their class, and these samples have several labels each.")
            if not self.points:
                raise UserError("t-SNE is switched off (--points 0).")
            self._tell(f"computing the representations of {label}")
            viewer = Viewer(trained, [row["client"] for row in run.clients if row["accuracy"] is not None], self.points)
            for found in viewer.together():  # one by one, so that an error keeps the maps computed before it
                insight.maps.append(found)
            insight.styles = viewer.styles()
            insight.layers = viewer.layers()
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
    federation = task.federation
    newcomers, clients = list(federation.newcomers), list(federation.names)
    sizes = [len(samples) for samples in federation.train]
    return Holdings(dataset.name, list(dataset.classes), table.tolist(), newcomers, groups, clients, sizes)
