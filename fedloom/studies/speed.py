"""How fast a network trains on this machine: FedAvg on made-up images for two rounds, with the engine asked for."""

import os
import tempfile

import numpy as np
import torch

from fedloom import objectives
from fedloom.config.recipe import Recipe
from fedloom.core.task import Task
from fedloom.data import Dataset, Federation
from fedloom.engines import engine_class
from fedloom.experiment.loop import Experiment
from fedloom.models import Factory

SHAPES = {"mnist": (1, 28), "fashion-mnist": (1, 28), "emnist": (1, 28), "usps": (1, 16), "digits": (1, 8)}
"""Channels and sides of datasets that are not of CIFAR's shape, unless the recipe resizes them."""
ENOUGH = 0.5
"""Seconds of a round that can be believed."""
MOST = 2048
"""Images of a client, whatever a round takes."""


def measured(recipe: Recipe) -> float:
    """Image-steps a second: images are added until a round takes long enough."""
    gpu = engine_class(recipe.engine).gpu and torch.cuda.is_available() and recipe.engine.device != "cpu"
    clients = 8 if gpu else os.cpu_count() or 1
    each = 8
    while True:
        seconds = _round(recipe, clients, each)
        if seconds > ENOUGH or each >= MOST:
            return clients * each / seconds
        each *= 4


def _round(recipe: Recipe, clients: int, each: int) -> float:
    """What the second round takes; the first has what is done only once."""
    channels, side = SHAPES.get(recipe.data.name, (3, 32))
    side, channels = recipe.data.size or side, recipe.data.channels or channels
    images = torch.randint(256, (clients * each, channels, side, side), dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    dataset = Dataset("made up", images, labels, torch.zeros(len(images), dtype=torch.bool), tuple(map(str, range(10))))
    held = [np.sort(part) for part in np.split(np.arange(len(images)), clients)]
    federation = Federation(held, [part[:1] for part in held])
    task = Task(dataset, federation, Factory(recipe.model.name, recipe.model.options), objectives.get("labels"))
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
