"""Consent of an organisation: allowed recipes or methods, updates, evaluations and costs, shown before it joins."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config.recipe import Recipe
from fedloom.core import registry
from fedloom.core.errors import UserError
from fedloom.core.message import Message, refuse_unless
from fedloom.core.metrics import CLASS_METRICS
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.core.workspace import Workspace
from fedloom.data import PARTITIONS
from fedloom.deploy.deployable import deployable
from fedloom.deploy.evaluation import EvaluationTerms
from fedloom.deploy.limits import JobLimits
from fedloom.deploy.terms import FederationTerms, fingerprint
from fedloom.experiment.files import write_whole
from fedloom.methods import method_class
from fedloom.models.base import MODELS
from fedloom.objectives.base import OBJECTIVES
from fedloom.report.ledger import ledger_lines
from fedloom.trust.ledger import Ledger
from fedloom.trust.secure.contribution import Contribution


class RefusalError(UserError):
    """Raised if an organisation refuses a request."""


@dataclass(frozen=True)
class Consent:
    """What an organisation allows, over all runs."""

    recipe: Recipe
    """The recipe in the organisation's folder; the only one that may run, unless `methods` allow others."""
    methods: tuple[str, ...]
    max_rounds: int | None
    """Maximum number of updates that are sent; None for no limit."""
    evaluation: EvaluationTerms
    limits: JobLimits
    secure_only: bool = False
    """Whether updates are sent only masked, for secure aggregation."""

    def __post_init__(self) -> None:
        for name in self.methods:
            method_class(name)  # reports an unknown name now, not when the first message arrives

    def check_names(self, values: Any, hashed: str, federation: FederationTerms) -> None:
        """Refuse a received recipe that names foreign code, before any name is looked up: a lookup would run the code.

        Foreign code is a file, or an entry point of another installed package, which neither fedloom ships nor this
        organisation's recipe or `methods` name. Without `methods`, only the recipe in the organisation's folder passes,
        compared by its hash.

        Args:
            values: The received recipe before validation.
            hashed: The hash of the recipe, as the server states it.
            federation: The terms of the federation.

        Raises:
            RefusalError: If the recipe is not allowed.
        """
        if not self.methods and hashed != fingerprint(self.recipe, federation):
            raise RefusalError(_OTHER_RECIPE)
        known = {*_texts(self.recipe.resolved()), *map(registry.absolute, self.methods)}
        for field, name in _named(values):
            ours = field in NAMED and NAMED[field].is_shipped(name)
            if not ours and registry.absolute(name) not in known:
                raise RefusalError(
                    f"{field}: names code that is neither part of fedloom nor named in this organisation's recipe.yaml "
                    f"or --allow-methods {','.join(self.methods)}"
                )
        data = values.get("data")
        if isinstance(data, Mapping):  # each client chooses its own images: these names are never looked up
            values = {**values, "data": {name: value for name, value in data.items() if name not in ("name", "dir")}}
        for text in _texts(values):
            if ".py" in text and text not in known:
                raise RefusalError("the recipe names a file that this organisation's recipe.yaml does not name")

    def check(self, asked: Recipe, federation: FederationTerms, answered: int) -> None:
        """Refuse a recipe that the consent does not cover, with all its rounds.

        Args:
            asked: The requested recipe.
            federation: The terms of the federation.
            answered: Number of updates that were sent so far.

        Raises:
            RefusalError: If the recipe, its method or its rounds are not allowed.
            UserError: If no federation can run the recipe.
        """
        deployable(asked)
        if self.methods:
            if asked.method.name not in self.methods:
                raise RefusalError(f"method.name = '{asked.method.name}': only {', '.join(self.methods)} may run here")
        elif fingerprint(asked, federation) != fingerprint(self.recipe, federation):
            raise RefusalError(_OTHER_RECIPE)
        if self.secure_only and asked.secure is None:
            raise RefusalError(
                "secure: the recipe has no such section, and this organisation sends only masked updates "
                "(--require-secure-aggregation)"
            )
        rounds = asked.training.rounds
        if self.max_rounds is not None and answered >= self.max_rounds:
            raise RefusalError(f"--max-rounds {self.max_rounds}: all these updates have already been sent")
        if self.max_rounds is not None and rounds > self.max_rounds:
            raise RefusalError(f"training.rounds = {rounds}: this organisation allows at most {self.max_rounds}")

    def lines(self, federation: FederationTerms, task: Task, organisation: str) -> Iterator[str]:
        """Yield lines that describe what may be sent and what a job may cost, shown before an organisation joins."""
        rounds = self.recipe.training.rounds if self.max_rounds is None else self.max_rounds
        yield f"'{organisation}' joins '{federation.name}' at {federation.host}:{federation.port}"
        limit = "no limit (--max-rounds sets one)" if self.max_rounds is None else f"at most {self.max_rounds} updates"
        yield f"updates that may be sent: {limit}"
        test = len(task.federation.test[federation.number(organisation)])
        yield from self.evaluation.lines(test, self._figures(len(federation.classes)))
        yield from self.limits.lines()
        for recipe in self._covered():
            only = "any recipe of the method" if self.methods else "only the recipe in this folder, with the method"
            yield f"allowed: {only} {recipe.method.name}. What is sent, and what is not:"
            self.limits.check(recipe, task)
            yield from (f"  {line}" for line in self._what_leaves(recipe, task, min(rounds, recipe.training.rounds)))
        yield (
            "the server sees each of these messages individually (docs/explanation/deployment.md explains what that "
            "means)"
            if self.recipe.secure is None
            else "the server sees only the sum of several organisations' messages (docs/explanation/trust.md explains "
            "what that protects)"
        )

    def _figures(self, classes: int) -> tuple[str, ...]:
        """Return the figures that allowed recipes may ask for: the recipe's, or any if only methods are named."""
        every = (*(name for name in CLASS_METRICS if name != "f1" or classes == 2), "loss")
        return every if self.methods else self.recipe.evaluation.wanted

    def ledger(self, recipe: Recipe, workspace: Workspace) -> Ledger:
        """Return an empty ledger of this organisation, with what is never sent and what is sent besides tensors."""
        made = Ledger()
        made.describe(  # models stay in the organisation's folder
            workspace, models=False, privacy=recipe.privacy, secure=recipe.secure, simulated=False
        )
        return made

    def _what_leaves(self, recipe: Recipe, task: Task, rounds: int) -> Iterator[str]:
        """Return the lines of the ledger that the organisation would have after some rounds."""
        workspace = Workspace(Setup(task, recipe.make_method(), recipe.training, recipe.seed, recipe.wire))
        wire, received = workspace.setup.codec, Message(workspace.downward())
        up, down = wire.encode_up(Message(workspace.sent), received, {})[0], wire.encode_down(received)
        if recipe.secure is not None:
            up = Contribution(recipe.secure, recipe.privacy, recipe.make_method(), up.signature).example()
        ledger = self.ledger(recipe, workspace)
        client = next(c for c, samples in enumerate(task.federation.train) if len(samples))
        for round in range(1, rounds + 1):
            ledger.add("up", round, client, up)
            ledger.add("down", round, client, down)
        return ledger_lines(ledger.to_json())

    def _covered(self) -> Iterator[Recipe]:
        if not self.methods:
            yield self.recipe
        values = self.recipe.model_dump(mode="json", exclude_unset=True)
        for name in self.methods:
            same = name == self.recipe.method.name
            yield self.recipe if same else Recipe.parse(values | {"method": name, "objective": None})


_OTHER_RECIPE = (
    "the recipe is not the one in this organisation's folder; use the same recipe.yaml, or allow its method with "
    "--allow-methods"
)
NAMED: dict[str, registry.Registry[Any]] = {
    "model.name": MODELS,
    "objective.name": OBJECTIVES,
    "data.partition": PARTITIONS,
}
"""Fields that name code, in addition to `method.name`, whose values `methods` allow."""


def _named(values: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of a recipe that name code, with the names that are strings."""
    for field in ("method.name", *NAMED):
        section, _, name = field.partition(".")
        found = values.get(section)
        found = found.get(name) if isinstance(found, Mapping) else found if name == "name" else None
        if isinstance(found, str):
            yield field, found.partition(":")[0] if name == "partition" and ".py:" not in found else found


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


class UpdateCounter:
    """Number of updates that this organisation has sent in all runs, written to disk before each update is sent."""

    def __init__(self, folder: Path):
        self._path = folder / "answered.json"

    @property
    def count(self) -> int:
        """Number of updates so far."""
        try:
            return int(json.loads(self._path.read_text(encoding="utf-8"))["updates"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"'{self._path}' cannot be read ({error}): it counts the updates that were sent; restore it from a "
                "backup"
            ) from None

    def add(self) -> None:
        """Count one more update."""
        write_whole(self._path, json.dumps({"updates": self.count + 1}).encode() + b"\n", private=True)


class RequestLog:
    """Received requests, one line each on disk, so that a signed request that is replayed is executed only once."""

    def __init__(self, folder: Path):
        self._path = folder / "seen.txt"
        self._names = set(self._path.read_text(encoding="ascii").split()) if self._path.exists() else set()

    def add(self, name: str) -> None:
        """Record a request before it is executed.

        Raises:
            MessageError: If the request was recorded before.
        """
        refuse_unless(name not in self._names, "it was received before and is now sent again")
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(f"\n{name}")  # line break first: a name truncated by a crash does not corrupt the next one
            file.flush()
            os.fsync(file.fileno())
        self._names.add(name)
