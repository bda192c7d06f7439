"""A federation of three organisations, and a grid that hands messages to them without a network."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flwr.app import Message as Parcel
from flwr.supercore.task_identity import TaskIdentity

from fedloom.config.recipe import Recipe
from fedloom.core.task import Task
from fedloom.deploy.certificates import read_key, read_public_key
from fedloom.deploy.engine import Flower
from fedloom.deploy.evaluation import EvaluationTerms
from fedloom.deploy.fleet import Fleet
from fedloom.deploy.init import write_federation
from fedloom.deploy.member import Member, load_member
from fedloom.deploy.tasks import task_elsewhere
from fedloom.deploy.terms import FederationTerms
from fedloom.deploy.worker import reply_to
from fedloom.experiment.build import make_task
from fedloom.experiment.loop import Experiment

NAMES = ("north", "south", "west")


def small_recipe(method: str | dict, **fields) -> Recipe:
    """Two rounds on some digits; fields go by their paths with `__` for dots."""
    values = {
        "method": method,
        "data": {"name": "digits", "clients": 3, "partition": "dirichlet:0.5", "limit": 200},
        "training": {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05, "momentum": 0.9}},
        "engine": {"name": "inline", "device": "cpu"},
        "seed": 5,
    }
    recipe = Recipe.parse(values)
    return recipe.with_(**{name.replace("__", "."): value for name, value in fields.items()})


def make_federation(
    folder: Path, recipe: Recipe, names: tuple[str, ...] = NAMES, host: str = "127.0.0.1", **ports: int
) -> Task:
    """The folder of `deploy init`, and each organisation's images under data/: what a simulation would give it."""
    task = make_task(recipe)
    images, labels = task.dataset.inputs.numpy(), task.dataset.labels.numpy()
    federation = FederationTerms(
        name="digits", host=host, organisations=names, classes=task.dataset.classes, shape=task.shape, **ports
    )
    write_federation(folder, federation, recipe)
    (folder / "data").mkdir()
    for name, train, test in zip(names, task.federation.train, task.federation.test, strict=True):
        np.savez(
            folder / "data" / f"{name}.npz", x_train=images[train], y_train=labels[train], x_test=images[test],
            y_test=labels[test], classes=np.array(task.dataset.classes),
        )  # fmt: skip
    return task


EXACT = EvaluationTerms("classes", min_test=0, epsilon=math.inf)
"""Answers to evaluations as a simulation has them, apart from the loss."""


def member(folder: Path, name: str, **consent) -> Member:
    consent = {"evaluation": EXACT, "max_evaluations": 100} | consent
    return load_member(folder / "organisations" / name, folder / "data" / f"{name}.npz", device="cpu", **consent)


def without_losses(history: list[dict]) -> list[dict]:
    """Rounds as an organisation lets the server know them: the loss of an evaluation never leaves."""
    return [record | {name: None for name in record if name.endswith("_loss")} for record in history]


class LoopGrid:
    """Flower's grid, as far as it is used, with the organisations in this process."""

    def __init__(self, members: dict[int, Member]):
        self.members = members
        self.online = set(members)
        self.silent: set[int] = set()
        self.since: dict[int, str] = {}
        self.sent: list[Parcel] = []
        self.on_request = self.on_reply = lambda parcel: parcel
        self._waiting: dict[str, Parcel] = {}
        self._numbers = itertools.count(1)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # Flower sets these in its processes

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=node, last_activated_at=self.since.get(node, "")) for node in self.online]

    def push_messages(self, parcels: list[Parcel]) -> list[str]:
        names = []
        for parcel in parcels:
            name = f"parcel {next(self._numbers)}"
            parcel.metadata.__dict__["_message_id"] = name
            self._waiting[name] = parcel
            self.sent.append(parcel)
            names.append(name)
        return names

    def pull_messages(self, names: list[str]) -> list[Parcel]:
        parcels = [self._waiting[name] for name in names if name in self._waiting]
        return [
            self.on_reply(reply_to(self.members[parcel.metadata.dst_node_id], self.on_request(parcel)))
            for parcel in parcels
            if parcel.metadata.dst_node_id in self.online - self.silent
        ]


def make_fleet(folder: Path, grid: LoopGrid, recipe: Recipe, run: str = "one", names: tuple[str, ...] = NAMES) -> Fleet:
    server = folder / "server"
    keys = {c: read_public_key(server / "organisations" / f"{name}.pub") for c, name in enumerate(names)}
    nodes = {100 + c: c for c in range(len(names))}
    return Fleet(grid, FederationTerms.load(server), nodes, keys, read_key(server / "coordinator.key"), recipe, run)


def make_experiment(fleet: Fleet, recipe: Recipe, timeout: float = 5, **options) -> Experiment:
    """As the server has it."""
    return Experiment(
        recipe.with_("storage.personal_models=false", "storage.checkpoint_every=1"),
        task=task_elsewhere(recipe, fleet.federation, fleet.train, fleet.test),
        engine=lambda setup, settings: Flower(
            setup, settings, fleet, needed=recipe.training.min_clients, wait=2, timeout=timeout
        ),
        **options,
    )


class LocalFederation:
    """A federation in a folder, with all its organisations at work in this process."""

    def __init__(self, folder, recipe, **limits):
        self.folder, self.recipe = folder, recipe
        self.task = make_federation(folder, recipe)
        self.members = {100 + c: member(folder, name, **limits) for c, name in enumerate(NAMES)}
        self.grid = LoopGrid(self.members)
        self.fleet = make_fleet(folder, self.grid, recipe)

    def run(self, **options):
        self.fleet.wait_for(3, 1, 0.5)
        experiment = make_experiment(self.fleet, self.recipe, **options)
        experiment.run()
        return experiment


def with_content(parcel, content):
    """The same message with other contents, as somebody in the middle could make it."""
    changed = Parcel.__new__(Parcel)
    changed.__dict__.update(parcel.__dict__)
    changed.__dict__["_content"] = content
    return changed
