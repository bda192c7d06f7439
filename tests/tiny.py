"""A tiny federation that has every awkward client: one-class, smaller than a batch, a single sample."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom import objectives
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.task import Task
from fedloom.data import Dataset, Federation
from fedloom.data.augment import parse_augment
from fedloom.experiment.loop import Experiment
from fedloom.models import Factory


def tiny_dataset(samples: int = 240, classes: int = 4, shape: tuple[int, int, int] = (1, 8, 8)) -> Dataset:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, classes, samples))
    centres = rng.integers(40, 215, (classes, *shape))
    images = np.clip(centres[labels.numpy()] + rng.normal(0, 40, (samples, *shape)), 0, 255)
    return Dataset(
        name="tiny",
        inputs=torch.from_numpy(images.astype(np.uint8)),
        labels=labels,
        test=torch.zeros(samples, dtype=torch.bool),
        classes=tuple(f"class {c}" for c in range(classes)),
    )


def tiny_task(model: str = "mlp", augment: tuple[str, ...] = ("crop:1", "noise:0.05"), **options: object) -> Task:
    """Six clients: 0–3 ordinary, 4 has one class and 5 samples (less than a batch), 5 has a single sample."""
    dataset = tiny_dataset()
    order = np.random.default_rng(1).permutation(len(dataset.labels))
    of_one_class = order[dataset.labels.numpy()[order] == 2][:8]
    rest = order[~np.isin(order, of_one_class)]
    cuts = np.split(rest[2:], [70, 121, 170])
    train = [part[: len(part) * 3 // 4] for part in cuts] + [of_one_class[:5], rest[:1]]
    test = [part[len(part) * 3 // 4 :] for part in cuts] + [of_one_class[5:], rest[1:2]]
    return Task(
        dataset,
        Federation([np.sort(t) for t in train], [np.sort(t) for t in test]),
        Factory(model, options or {"norm": True}),
        objectives.get("labels"),
        augment=parse_augment(augment),
        views=parse_augment(augment),
    )


def task_of_kind(objective: str, *, table: bool = False) -> Task:
    """The tiny federation with two classes or three labels, of images or of rows of a table."""
    task, rng = tiny_task(), np.random.default_rng(2)
    labels = task.dataset.labels
    if objective == "multilabel":
        labels, classes = torch.stack([labels > 0, labels % 2 == 1, labels == 3], 1).to(torch.uint8), ("a", "b", "c")
    else:
        labels, classes = labels % 2, ("no", "yes")
    inputs = task.dataset.inputs
    if table:
        inputs = (inputs.flatten(1)[:, :9].float() / 255 + torch.from_numpy(rng.normal(0, 0.1, (240, 9)))).float()
    dataset = Dataset("tiny", inputs, labels, task.dataset.test, classes)
    augment = {"augment": None, "views": None} if table else {}
    return replace(task, dataset=dataset, objective=objectives.get(objective), **augment)


def with_validation(task: Task) -> Task:
    """The task with every third training sample of a client as a validation sample; client 5 has none to spare."""
    old = task.federation
    validation = [part[::3] if len(part) > 1 else part[:0] for part in old.train]
    train = [np.setdiff1d(part, held) for part, held in zip(old.train, validation, strict=True)]
    return replace(task, federation=replace(old, train=train, validation=validation))


class _Unreadable:
    def __getitem__(self, index):
        raise AssertionError("a label was read")

    def to(self, device):
        return self


def without_labels(task: Task) -> Task:
    """The task with labels that fail the test when they are read."""
    stored = replace(task.stored, labels=_Unreadable())
    object.__setattr__(task, "__dict__", task.__dict__ | {"stored": stored})
    return task


HEADS = {"head_epochs": 3, "head_steps": 5}
SMALL = {
    "fedstyle": {"style_epochs": 2, **HEADS},
    "fedbabu": {"ft_epochs": 2},
    "repper": HEADS,
    "fedrep": {"personal_epochs": 3},
    "fedala": {"most_epochs": 10},
    "fedtgp": {"server_epochs": 5},
}
"""What takes many epochs, made to take few: these runs are about equal numbers, not good ones."""


def small(method: str | dict, objective: str | dict = "labels") -> dict:
    """A method with few epochs in its extra stages."""
    given = {"name": method} if isinstance(method, str) else method
    base, *added = given["name"].split("+")
    fields = SMALL.get(base, {})
    if "ft" in added:
        fields = fields | {"ft_epochs": 2}
    elif (
        added or not objectives.get(objective if isinstance(objective, str) else objective["name"]).supervised
    ):  # heads, or the probes that stand in for labels
        fields = fields | HEADS
    return fields | given


def tiny_run(method: str | dict, **options):
    """A finished experiment."""
    experiment = tiny_experiment(method, **options)
    experiment.run()
    return experiment


def tiny_run_with_memory(method: str | dict, **options):
    """A finished experiment, and what every client kept at its end."""
    kept: dict[int, dict[str, Tensor]] = {}

    def note(record: dict) -> None:
        states = {client: experiment.memory.get(client) for client in range(experiment.task.clients)}
        kept.update({client: {n: t.clone() for n, t in state.items()} for client, state in states.items() if state})

    experiment = tiny_experiment(method, on_round=note, **options)
    experiment.run()
    return experiment, kept


def tiny_experiment(
    method: str | dict, *, engine: str = "inline", workers: int | None = 2, task: Task | None = None, on_round=None,
    callbacks=(), **fields,
):  # fmt: skip
    """Three rounds with part of the clients; fields go by their paths with `__` for dots."""
    objective = fields.pop("objective", "labels")
    values = {
        "method": small(method, objective),
        "objective": objective if objective != "labels" else None,
        "engine": {"name": engine, "workers": workers, "device": "cpu"},
        "training": {
            "rounds": 3, "fraction": 0.6, "batch_size": 16, "schedule": "step:3=0.5",
            "optimizer": {"lr": 0.05, "momentum": 0.9},
        },
        "seed": 3,
    }  # fmt: skip
    trusted_code.allow(values)
    recipe = Recipe.parse(values)
    if fields:
        recipe = recipe.with_(**{name.replace("__", "."): value for name, value in fields.items()})
    return Experiment(recipe, task=task or tiny_task(), on_round=on_round, callbacks=callbacks)


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(history: list[dict]) -> list[dict]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in history]
