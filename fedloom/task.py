"""The task: what is to be learnt, by whom, from what. It knows nothing of methods."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import objectives
from fedloom.data import Dataset, Federation
from fedloom.data.augment import Augment, parse_augment
from fedloom.data.batch import Pixels
from fedloom.models import SplitModel, build
from fedloom.objectives import Objective

EVERYONE = -1
"""The client that stands for all data in one place."""


@dataclass(frozen=True)
class Task:
    """Data, who holds what, the network, and what it is trained on."""

    dataset: Dataset
    federation: Federation
    model_name: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    augment: Augment = field(default_factory=lambda: parse_augment([]))
    views: Augment = field(default_factory=lambda: parse_augment([]))
    normalise: str = "half"
    objective: Objective = field(default_factory=lambda: objectives.get("labels"))
    elsewhere: bool = False
    """the images lie with the clients; here is only how many each has"""

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.dataset.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.dataset.images.shape[1:]
        return channels, height, width

    @property
    def clients(self) -> int:
        """How many clients there are, newcomers included."""
        return len(self.federation.train)

    def model(self) -> SplitModel:
        """A freshly initialised network, with the head that the objective trains."""
        network = build(self.model_name, shape=self.shape, classes=self.classes, **self.model_options)
        return self.objective.equip(network)

    @cached_property
    def features(self) -> int:
        """Width of the representation."""
        with torch.random.fork_rng(devices=[]):
            return self.model().features

    @cached_property
    def largest_client(self) -> int:
        """Training samples of the largest client."""
        return max(len(samples) for samples in self.federation.train)

    @cached_property
    def _everything(self) -> np.ndarray:
        held_out = set(self.federation.newcomers)
        return np.concatenate([s for c, s in enumerate(self.federation.train) if c not in held_out])

    def samples(self, client: int) -> np.ndarray:
        """Positions of a client's training samples."""
        return self._everything if client == EVERYONE else self.federation.train[client]

    @cached_property
    def pixels(self) -> Pixels:
        """The dataset with its normalisation, on the CPU."""
        mean, std = channel_statistics(self.dataset, self.normalise)
        return Pixels(self.dataset.images, self.dataset.labels, mean, std, self.augment, self.views)


def longest_first(task: Task, clients: Iterable[int]) -> list[int]:
    """Those with most training samples first: the order in which engines take them, and in which sums are made."""
    return sorted(clients, key=lambda c: (-len(task.samples(c)), c))


def channel_statistics(dataset: Dataset, how: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel: 0.5 (`half`), or measured on up to 10,000 training images."""
    channels = dataset.images.shape[1]
    if how == "half":
        return torch.full((channels, 1, 1), 0.5), torch.full((channels, 1, 1), 0.5)
    train = (~dataset.test).nonzero()[:, 0]
    some = dataset.images[train[:: max(1, len(train) // 10_000)]].double().div(255)
    mean, std = some.mean((0, 2, 3)), some.std((0, 2, 3))
    return mean.float().reshape(-1, 1, 1), std.float().clamp_min(1e-3).reshape(-1, 1, 1)


def group_of_clients(task: Task) -> list[int]:
    """Which style (or other group of the dataset) each client belongs to; 0 for all where there are none."""
    groups = task.dataset.groups
    if groups is None:
        return [0] * task.clients
    return [int(groups[samples[0]]) if len(samples) else -1 for samples in task.federation.train]
