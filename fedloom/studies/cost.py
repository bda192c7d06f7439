"""Counting of the passes of a run through its network, and measurement of a machine's speed."""

import os
import tempfile

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import objectives
from fedloom.config.recipe import Recipe
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.core.workspace import Workspace
from fedloom.data import Dataset, Federation
from fedloom.data.federation import parse_split
from fedloom.data.sources import SOURCES, Source
from fedloom.engines import engine_class
from fedloom.experiment.build import load_dataset
from fedloom.experiment.loop import Experiment
from fedloom.methods import Method
from fedloom.models import Factory, SplitModel
from fedloom.objectives import Objective

SIZES = {
    "mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000), "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000), "cinic10": (180_000, 90_000), "emnist": (112_800, 18_800), "svhn": (73_257, 26_032),
    "usps": (7_291, 2_007), "office-home": (15_588, 0), "adaptiope": (36_900, 0), "digits": (1_797, 0),
}  # fmt: skip
"""Numbers of training and test images of the complete datasets."""
FORWARD = 1 / 3
"""Cost of a forward pass relative to a forward and backward pass."""
SAMPLE = 8
"""Number of images of the client whose passes are counted."""


def passes(recipe: Recipe) -> tuple[float, float]:
    """Return how many passes an image makes through the network per round, and how many of them have a backward pass.

    The passes are counted in an actual update of a client with a few images, so that each view, each epoch of each
    `fit` and each pass of a frozen network is included.
    """
    method, objective = recipe.make_method(), recipe.make_objective()
    key = repr((method.name, sorted(vars(method).items()), objective, recipe.training.epochs))
    if key not in _counted:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for eight images, 10 times faster than several threads on busy cores
        try:
            _counted[key] = _count(recipe, method, objective)
        finally:
            torch.set_num_threads(threads)
    return _counted[key]


_counted: dict[str, tuple[float, float]] = {}


def _count(recipe: Recipe, method: Method, objective: Objective) -> tuple[float, float]:
    images = torch.arange(SAMPLE * 64, dtype=torch.float32).remainder(251).to(torch.uint8).reshape(SAMPLE, 1, 8, 8)
    samples, test = np.arange(SAMPLE), torch.zeros(SAMPLE, dtype=torch.bool)
    dataset = Dataset("counted", images, torch.arange(SAMPLE) % 2, test, ("a", "b"))
    task = Task(dataset, Federation([samples], [samples]), Factory("mlp"), objective)
    training = recipe.training.model_copy(update={"batch_size": SAMPLE})
    workspace = Workspace(Setup(task, method, training, seed=0))
    forward = backward = 0

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal forward, backward
        forward += len(inputs[0])
        backward += len(inputs[0]) * output.requires_grad

    for module in (*workspace.parts.modules(), *workspace.received.modules()):
        if isinstance(module, SplitModel):
            module.extractor.register_forward_hook(note)
    perform(workspace, Job("update", 1, Message(workspace.downward()), client=0))
    return forward / SAMPLE, backward / SAMPLE


def image_steps(recipe: Recipe) -> float:
    """Return the number of forward and backward passes of images in a run, without evaluation."""
    data, training = recipe.data, recipe.training
    kind, kept = parse_split(data.split)
    sizes = []
    for name in data.name.split("+"):
        train, test = (min(n, data.limit or n) for n in SIZES.get(name) or _counted_size(recipe, name))
        sizes.append(kept * (train + test if kind in ("pooled", "domain") else train))
    held_out = data.newcomers if data.newcomers < 1 else data.newcomers / data.clients
    forward, backward = passes(recipe)
    weight = backward + FORWARD * (forward - backward)
    a_round = sum(sizes) * (1 - held_out) * training.fraction * weight
    return a_round * training.rounds


def _counted_size(recipe: Recipe, name: str) -> tuple[int, int]:
    """Return the numbers of training and test samples of a dataset that is not in `SIZES`."""
    test = load_dataset(recipe.with_(**{"data.name": name})).test
    return len(test) - int(test.sum()), int(test.sum())


SHAPES = {"mnist": (1, 28), "fashion-mnist": (1, 28), "emnist": (1, 28), "usps": (1, 16), "digits": (1, 8)}
"""Channels and side length of datasets whose images differ from CIFAR's 3×32×32."""
LEAST_SECONDS = 0.5
"""Seconds that a round must take for a reliable measurement."""
MOST_IMAGES = 2048
"""Largest number of images per client in a measurement, however short the round."""


def measured_speed(recipe: Recipe) -> float:
    """Measure image-steps per second; images are added until a round takes long enough."""
    gpu = engine_class(recipe.engine).gpu and torch.cuda.is_available() and recipe.engine.device != "cpu"
    clients = 8 if gpu else os.cpu_count() or 1
    each = 8
    while True:
        seconds = _seconds_of_a_round(recipe, clients, each)
        if seconds > LEAST_SECONDS or each >= MOST_IMAGES:
            return clients * each / seconds
        each *= 4


def message_bytes(recipe: Recipe) -> tuple[int, int]:
    """Return the bytes that a client sends and receives in a round, counted in a round with a few made-up images."""
    source = SOURCES.find(recipe.data.name)
    assert isinstance(source, Source)
    task = made_up(recipe, clients=2, each=SAMPLE, classes=len(source.classes) or source.count)
    with tempfile.TemporaryDirectory(prefix="fedloom-bytes-") as folder:
        short = recipe.with_(**{
            "training.rounds": 1, "training.fraction": 1.0, "training.epochs": 1, "training.batch_size": SAMPLE,
            "evaluation.every": 10**6, "storage.personal_models": False, "engine.name": "inline",
            "out": f"{folder}/run",
        })  # fmt: skip
        experiment = Experiment(short, task=task)
        experiment.run()
        return experiment.history[0]["up_bytes"], experiment.history[0]["down_bytes"]


def made_up(recipe: Recipe, clients: int, each: int, classes: int) -> Task:
    """Return a federation of random images with the shape of the recipe's data."""
    channels, side = SHAPES.get(recipe.data.name, (3, 32))
    side, channels = recipe.data.size or side, recipe.data.channels or channels
    images = torch.randint(256, (clients * each, channels, side, side), dtype=torch.uint8)
    labels = torch.arange(len(images)) % classes
    names = tuple(map(str, range(classes)))
    dataset = Dataset("made up", images, labels, torch.zeros(len(images), dtype=torch.bool), names)
    held = [np.sort(part) for part in np.split(np.arange(len(images)), clients)]
    federation = Federation(held, [part[:1] for part in held])
    return Task(dataset, federation, Factory(recipe.model.name, recipe.model.options), objectives.get("labels"))


def _seconds_of_a_round(recipe: Recipe, clients: int, each: int) -> float:
    """Return the seconds of the second round; the first includes one-time work."""
    task = made_up(recipe, clients, each, classes=10)
    with tempfile.TemporaryDirectory(prefix="fedloom-speed-") as folder:
        short = Recipe.parse(
            {
                "method": "fedavg",
                "model": recipe.model.model_dump(),
                "training": {"rounds": 2, "batch_size": recipe.training.batch_size},
                "evaluation": {"every": 10**6, "clients": 1},
                "storage": {"personal_models": False},
                "engine": recipe.engine.model_dump(),
                "out": f"{folder}/run",
            }
        )
        experiment = Experiment(short, task=task)
        experiment.run()
        return float(experiment.history[-1]["train_seconds"])
