"""The models and results of a run, read from its folder: `fedloom.load("runs/mine").personal(3)(images)`."""

from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import torch

from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.input_format import InputFormat
from fedloom.core.protocols import ModelFactory
from fedloom.core.state import State, under
from fedloom.core.task import Task
from fedloom.core.tensor_files import read_tensors
from fedloom.core.workspace import Workspace
from fedloom.data.frames import few
from fedloom.data.sources.tree import one_form
from fedloom.experiment.build import make_task
from fedloom.experiment.evaluation import RECEIVED
from fedloom.experiment.records import ClientRow, RoundRecord, Summary, TaskFacts
from fedloom.experiment.resume import fingerprint, refuse_other_data
from fedloom.experiment.run_folder import (
    REPEAT,
    SUMMARY,
    TASK,
    finished,
    initial_file,
    read_clients,
    read_facts,
    read_rounds,
    stored_values,
)
from fedloom.inference.trained_model import AVERAGED, GLOBAL, TrainedModel, blank_workspace, factory_of
from fedloom.models.per_client import NetworkPerClient

NAMED = 20
"""Maximum number of clients that an error names."""


class UnfinishedError(UserError, KeyError):
    """The run is not finished. A KeyError, too: `Run`, a mapping, has no keys then, and `get` returns the default."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class TrainedRun:
    """A run's models and results, read from its folder on demand; models do not need the data.

    `fedloom.Run` adds frames, the report and the summary's figures.

    Args:
        path: The run folder.
        task: The run's data, if they were made in Python.
        trust_code: Allow the Python files that the folder names to be imported.

    Attributes:
        folder: The run folder.
        recipe: The run's recipe.
        method: The run's method.

    Raises:
        UserError: The folder holds no run, or names a Python file that is not trusted.
    """

    def __init__(self, path: str | Path, *, task: Task | None = None, trust_code: bool = False):
        self.folder, self._trust_code = Path(path), trust_code
        self.recipe = _recipe(self.folder, trust_code)
        self.method = self.recipe.make_method()
        self._task = task

    @cached_property
    def summary(self) -> Summary | None:
        """The run's summary; None if the run is not finished."""
        return finished(self.folder)

    @cached_property
    def round_records(self) -> list[RoundRecord]:
        """Records of the rounds, the lines of metrics.jsonl."""
        return read_rounds(self.folder)

    @cached_property
    def client_rows(self) -> list[ClientRow]:
        """Clients' results of the last evaluation, the lines of clients.jsonl; empty if the run is not finished."""
        return read_clients(self.folder)

    @cached_property
    def facts(self) -> TaskFacts:
        """Classes, image shape, normalisation, network, clients, newcomers, styles."""
        facts = read_facts(self.folder)
        if self._trust_code:
            trusted_code.trust(trusted_code.not_allowed(facts))
        return facts

    @cached_property
    def form(self) -> InputFormat:
        """Format of the models' images: classes, shape, normalisation."""
        return InputFormat.from_json(self.facts)

    @cached_property
    def task(self) -> Task:
        """The data and their division among clients, loaded again and checked against the run's fingerprint."""
        task = self._task or make_task(self.recipe)
        refuse_other_data(task, fingerprint(task), self.facts["fingerprint"])
        return task

    @property
    def styles(self) -> tuple[str, ...]:
        """Names of the data's styles; one name if the data have a single style."""
        return tuple(self.facts["styles"])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients, such as those of their folders; empty if they have only numbers."""
        return tuple(self.facts.get("names", ()))

    def client_number(self, client: int | str) -> int:
        """Return the number of a client.

        Args:
            client: Its number, from 0, or its name. Text is first looked up among the names, then read as a number.

        Raises:
            UserError: The client does not exist.
        """
        if isinstance(client, str):
            if (name := one_form(client)) in self.names:
                return self.names.index(name)
            if not client.isdecimal():
                close = get_close_matches(client, self.names, NAMED) or self.names[:NAMED]
                known = nearest(client, close) if close else "the run's clients have numbers, not names"
                raise UserError(f"client = '{client}': there is no such client; {known}")
            client = int(client)
        count = self.facts["clients"]
        if not 0 <= client < count:
            named = f", named {few(self.names)}" if self.names else ""
            raise UserError(f"client = {client}: there is no such client; the run has clients 0 to {count - 1}{named}")
        return client

    def personal(self, client: int | str) -> TrainedModel:
        """Return a client's personal model.

        Args:
            client: Number of the client, from 0, or its name (of its folder, with `data.partition: natural`).

        Raises:
            UserError: The client does not exist, the run is not finished, or the client's model was not stored.

        Example:
            >>> logits = fedloom.load("runs/mine").personal("south")(images)   # doctest: +SKIP
        """
        client = self.client_number(client)
        if self.method.personal_is_global:
            return self._model(self._server, {}, client)
        name = f"client-{client:05d}"
        if not (self.folder / "models" / f"{name}.safetensors").exists():
            self._refuse_unfinished()
            why = (
                "storage.personal_models was false"
                if not self.recipe.storage.personal_models
                else "the client was not evaluated (evaluation.clients), or failed"
            )
            raise UserError(f"client = {client}: the run in '{self.folder}' did not store this client's model: {why}")
        own = self._read(name)
        down = {name: value for name, value in self._server.items() if under(name, self.method.down)}
        down |= {name.removeprefix(RECEIVED): value for name, value in own.items() if name.startswith(RECEIVED)}
        return self._model(down, {n: value for n, value in own.items() if not n.startswith(RECEIVED)}, client)

    def global_model(self, style: str | None = None) -> TrainedModel:
        """Return the global model.

        If the method shares a representation but no classifier, only `features` of the model can be used.

        Args:
            style: For objectives without labels: the style whose classifier to use. It may be left out if the data have
                a single style.

        Raises:
            UserError: The run is not finished, the method shares no representation, or the style is unknown.

        Example:
            >>> z = fedloom.load("runs/mine").global_model().features(images)   # doctest: +SKIP
        """
        self._refuse_different_networks("global model")
        own: State = {}
        if self._by_style:
            own = self._read(f"style-{self._style(style):05d}")
        elif style is not None:
            raise UserError(f"style = '{style}': {self.method.name} has one global model for all styles; leave it out")
        if not self.method.has_global and not self.shares_extractor:
            raise UserError(
                f"the run in '{self.folder}' has no global model: {self.method.name} shares no representation; choose "
                "a client's model (--client 3)"
            )
        return self._model(self._server, own, GLOBAL)

    def averaged(self) -> TrainedModel:
        """Return the average of the clients' personal models, weighted by training samples; newcomers are left out.

        It stands in for the global model of methods that have none, as in FedCRC's Table II and RepPer's Fig. 6.

        Raises:
            UserError: The run is not finished, or a client's model was not stored.
        """
        self._refuse_different_networks("average of its clients' models")
        rows = [row for row in self.client_rows if not row["newcomer"] and row["train"]]
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
        """Return the model whose extractor new clients build on.

        Returns:
            The global model if the method shares an extractor, else the average of the clients' models (`client` of the
            result is then `AVERAGED`).

        Raises:
            UserError: The run is not finished, or a client's model was not stored.
        """
        return (
            self.global_model(self.styles[0] if self._by_style else None) if self.shares_extractor else self.averaged()
        )

    @property
    def shares_extractor(self) -> bool:
        """Whether all clients have the same extractor: the server's, a frozen one, or one that nobody trains."""
        if any(under(name, ("model.extractor",)) for name in self._server):
            return True
        kept = any(under("model.extractor", (part,)) or under(part, ("model.extractor",)) for part in self.method.keeps)
        return not kept or under("model.extractor", self._workspace().fixed)

    @property
    def _by_style(self) -> bool:
        """Whether the global representation was evaluated with one classifier per style."""
        return self.method.has_global and self.method.overrides("generalise")

    def _style(self, style: str | None) -> int:
        if style is None and len(self.styles) == 1:
            return 0
        if style not in self.styles:
            raise UserError(f"style = {style!r}: {nearest(str(style), self.styles)}")
        return self.styles.index(style)

    def _model(self, message: State, memory: State, client: int) -> TrainedModel:
        workspace = self._workspace(0 if client < 0 else self._network.kind_of(client))
        self._refuse_other_shapes(workspace, message | memory)
        workspace.load(message, memory)
        return TrainedModel(workspace, self.form, client)

    def _refuse_other_shapes(self, workspace: Workspace, state: State) -> None:
        for name, part in workspace.tensors.items():
            if name in state and state[name].shape != part.shape:
                raise UserError(
                    f"'{self.folder / 'models'}': {name} has shape {list(state[name].shape)}, but {list(part.shape)} "
                    f"is expected; {REPEAT}"
                )

    def _workspace(self, kind: int = 0) -> Workspace:
        """Return a workspace for one of the networks that clients have, with its initial values."""
        workspace = blank_workspace(self.method, self.recipe.make_objective(), self.form, self._network.kinds[kind])
        initial = self._read(initial_file(kind))
        self._refuse_other_shapes(workspace, initial)
        workspace.start_from(initial)
        return workspace

    @cached_property
    def _network(self) -> ModelFactory:
        """The network of the run, or those of its clients."""
        found = factory_of(self.facts["model"])
        if isinstance(found, NetworkPerClient) and len(found.numbers) != self.facts["clients"]:
            raise UserError(
                f"'{self.folder / TASK}': has {len(found.numbers)} networks for {self.facts['clients']} clients; "
                + REPEAT
            )
        return found

    def _refuse_different_networks(self, what: str) -> None:
        if len(self._network.kinds) > 1:
            raise UserError(
                f"the run in '{self.folder}' has no {what}: its clients have different networks "
                f"({self._network.title}); choose a client's model (--client 3)"
            )

    @cached_property
    def _server(self) -> State:
        self._refuse_unfinished()
        return self._read("server")

    def _read(self, name: str) -> State:
        return read_tensors(self.folder / "models" / f"{name}.safetensors", "a model", REPEAT)[0]

    def _refuse_unfinished(self) -> None:
        if self.summary is None:
            raise UnfinishedError(
                f"'{self.folder}' has no {SUMMARY}: the run is not finished; resume it with: "
                + trusted_code.resume_command(self.folder, self.recipe.model_dump())
            )


def _recipe(folder: Path, trust_code: bool) -> Recipe:
    values = stored_values(folder)
    engine = values.get("engine")
    if isinstance(engine, dict) and engine.get("device") == "cuda":
        engine["device"] = "auto"  # a model may be used on a machine without a GPU
    return Recipe.parse(values, trust_code=trust_code)
