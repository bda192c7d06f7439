"""What a finished run has learnt, out of its folder alone: `fedloom.load("runs/mine").personal(3)(images)`."""

from functools import cached_property
from pathlib import Path

import torch

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.state import State, under
from fedloom.core.task import ImageFormat, Task
from fedloom.core.workspace import Workspace
from fedloom.experiment.build import make_task
from fedloom.experiment.evaluation import RECEIVED
from fedloom.experiment.records import ClientRow, RoundRecord, Summary, TaskFacts
from fedloom.experiment.resume import fingerprint, refuse_other_data
from fedloom.experiment.run_folder import (
    REPEAT,
    SUMMARY,
    finished,
    read_clients,
    read_facts,
    read_rounds,
    stored_values,
)
from fedloom.inference.trained_model import AVERAGED, GLOBAL, TrainedModel, blank_workspace, factory_of, read_tensors


class TrainedRun:
    """A run folder. Models are built when asked for, and need no data.

    `trust_code` imports the Python files that the folder names; without it they are refused.
    """

    def __init__(self, path: str | Path, *, task: Task | None = None, trust_code: bool = False):
        self.path, self._trust_code = Path(path), trust_code
        self.recipe = _recipe(self.path, trust_code)
        self.method = self.recipe.make_method()
        self._task = task

    @cached_property
    def summary(self) -> Summary | None:
        """The run's figures; none while it is not finished."""
        return finished(self.path)

    @cached_property
    def history(self) -> list[RoundRecord]:
        """A record per round."""
        return read_rounds(self.path)

    @cached_property
    def clients(self) -> list[ClientRow]:
        """What the last evaluation said of each client."""
        return read_clients(self.path)

    @cached_property
    def facts(self) -> TaskFacts:
        """Classes, image shape, normalisation, network, clients, newcomers, styles."""
        facts = read_facts(self.path)
        if self._trust_code:
            trusted_code.trust(trusted_code.not_allowed(facts))
        return facts

    @cached_property
    def form(self) -> ImageFormat:
        """Of the images that its models take."""
        return ImageFormat.from_json(self.facts)

    @cached_property
    def task(self) -> Task:
        """The data and who holds what, loaded anew and checked to be the run's."""
        task = self._task or make_task(self.recipe)
        refuse_other_data(task, fingerprint(task), self.facts["fingerprint"])
        return task

    @property
    def styles(self) -> tuple[str, ...]:
        """Names of the data's styles (one, where there are none)."""
        return tuple(self.facts["styles"])

    def personal(self, client: int) -> TrainedModel:
        """A client's own model."""
        count = self.facts["clients"]
        if not 0 <= client < count:
            raise UserError(f"client = {client}: the run has clients 0 to {count - 1}")
        if self.method.personal_is_global:
            return self._model(self._server, {}, client)
        name = f"client-{client:05d}"
        if not (self.path / "models" / f"{name}.safetensors").exists():
            self._refuse_unfinished()
            why = (
                "storage.personal_models was off"
                if not self.recipe.storage.personal_models
                else "it was not evaluated (evaluation.clients), or failed"
            )
            raise UserError(f"client = {client}: the run in '{self.path}' kept no model of it: {why}")
        own = self._read(name)
        down = {name: value for name, value in self._server.items() if under(name, self.method.down)}
        down |= {name.removeprefix(RECEIVED): value for name, value in own.items() if name.startswith(RECEIVED)}
        return self._model(down, {n: value for n, value in own.items() if not n.startswith(RECEIVED)}, client)

    def global_model(self, style: str | None = None) -> TrainedModel:
        """The model for everybody. Without labels a classifier was fitted on it for each style: say which.

        Where a method shares a representation but no classifier, only `features` can be asked for.
        """
        own: State = {}
        if self._by_style:
            own = self._read(f"style-{self._style(style):05d}")
        elif style is not None:
            raise UserError(f"style = '{style}': {self.method.name} has one global model for all; leave it out")
        if not self.method.has_global and not self._shares:
            raise UserError(
                f"the run in '{self.path}' has no global model: {self.method.name} shares no representation; say whose "
                "model you want (--client 3)"
            )
        return self._model(self._server, own, GLOBAL)

    def averaged(self) -> TrainedModel:
        """The average of the clients' own models, by their sizes: what a method without a global model has for others.

        FedCRC's Table II and RepPer's Fig. 6 judge such methods so. Newcomers are left out.
        """
        rows = [row for row in self.clients if not row["newcomer"] and row["train"]]
        if not rows:
            self._refuse_unfinished()
        total = sum(row["train"] for row in rows)
        mean: State = {}
        for row in rows:
            for name, value in self.personal(row["client"]).workspace.tensors.items():
                if not value.is_floating_point():
                    mean[name] = torch.maximum(mean.get(name, value), value)
                else:
                    mean[name] = mean.get(name, torch.zeros_like(value, dtype=torch.float64)) + row["train"] * value
        own = {name: (value / total).float() if value.is_floating_point() else value for name, value in mean.items()}
        return self._model(self._server, own, AVERAGED)

    def representation(self) -> TrainedModel:
        """What new clients build on: the shared extractor, else the average of the clients' (`client` tells)."""
        return self.global_model(self.styles[0] if self._by_style else None) if self._shares else self.averaged()

    @property
    def _shares(self) -> bool:
        """Whether the server has an extractor."""
        return any(under(name, ("model.extractor",)) for name in self._server)

    @property
    def _by_style(self) -> bool:
        """Whether the global representation was judged by a classifier for each style."""
        return self.method.has_global and self.method.overrides("generalise")

    def _style(self, style: str | None) -> int:
        if style is None and len(self.styles) == 1:
            return 0
        if style not in self.styles:
            raise UserError(f"style = {style!r}: {nearest(str(style), self.styles)}")
        return self.styles.index(style)

    def _model(self, message: State, memory: State, client: int) -> TrainedModel:
        workspace = self._lane()
        self._refuse_other_shapes(workspace, message | memory)
        workspace.load(message, memory)
        return TrainedModel(workspace, self.form, client)

    def _refuse_other_shapes(self, workspace: Workspace, state: State) -> None:
        for name, part in workspace.tensors.items():
            if name in state and state[name].shape != part.shape:
                raise UserError(
                    f"'{self.path / 'models'}': {name} has shape {list(state[name].shape)}, and {list(part.shape)} is "
                    f"expected; {REPEAT}"
                )

    def _lane(self) -> Workspace:
        workspace = blank_workspace(
            self.method, self.recipe.make_objective(), self.form, factory_of(self.facts["model"])
        )
        self._refuse_other_shapes(workspace, self._initial)
        workspace.initial |= self._initial
        return workspace

    @cached_property
    def _server(self) -> State:
        self._refuse_unfinished()
        return self._read("server")

    @cached_property
    def _initial(self) -> State:
        return self._read("initial")

    def _read(self, name: str) -> State:
        return read_tensors(self.path / "models" / f"{name}.safetensors", "a model", REPEAT)[0]

    def _refuse_unfinished(self) -> None:
        if self.summary is None:
            raise UserError(
                f"'{self.path}' has no {SUMMARY}: the run is not finished; go on with: "
                + trusted_code.resume_command(self.path, self.recipe.model_dump())
            )


def load(path: str | Path, *, task: Task | None = None, trust_code: bool = False) -> TrainedRun:
    """A run by its folder. `task` is for runs whose data were made in Python.

    A Python file that the folder names (a method or a network of one's own) is imported only with `trust_code`, or if
    this process was given its name before: read the file first.

    >>> fedloom.load("runs/mine").personal(3)(images)   # doctest: +SKIP
    """
    return TrainedRun(path, task=task, trust_code=trust_code)


def _recipe(folder: Path, trust_code: bool) -> Recipe:
    values = stored_values(folder)
    engine = values.get("engine")
    if isinstance(engine, dict) and engine.get("device") == "cuda":
        engine["device"] = "auto"  # a model may be used where there is no GPU
    return Recipe.parse(values, trust_code=trust_code)
