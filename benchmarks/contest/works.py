"""The works that are measured: their clients, images, network and method; and what a contestant tells of itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fedloom import Task, objectives
from fedloom.data import Dataset, Federation, federate
from fedloom.data.augment import parse_augment
from fedloom.models import Factory, SplitModel, build

CLASSES, SHAPE, TESTED = 10, (3, 32, 32), 16
LIGHT = ("crop:4", "flip")
TRAINED = 0.75
"""The share of a client's images that it trains on, where sizes are drawn from Dir(0.1)."""


@dataclass(frozen=True)
class Work:
    """A round of training. `images` are those that are trained on, of all clients together."""

    letter: str
    title: str
    clients: int
    images: int
    batch: int
    model: str
    options: tuple[tuple[str, Any], ...] = ()
    method: str = "fedavg"
    lr: float = 0.01
    views: int = 1
    dirichlet: bool = False
    variants: tuple[str, ...] = ()
    """fedloom's contestants, besides `inline`."""
    peers: tuple[str, ...] = ()
    """Other libraries that are asked to do it."""

    def scaled(self, scale: float) -> "Work":
        """A smaller one of the same kind, for a trial."""
        each = max(4, round(self.images * scale / self.clients))
        return replace(self, images=each * self.clients, batch=min(self.batch, each)) if scale != 1 else self

    def network(self) -> SplitModel:
        """The network, freshly initialised."""
        return build(self.model, shape=SHAPE, classes=CLASSES, **dict(self.options))

    def task(self) -> Task:
        """Learnable images made on the spot, and who holds which."""
        if self.dirichlet:
            dataset = synthetic(round(self.images / TRAINED))
            least = min(10, max(1, len(dataset.images) // (20 * self.clients)))
            split = f"pooled:{TRAINED}"
            federation = federate(
                dataset, clients=self.clients, partition="dirichlet:0.1", split=split, minimum=least, seed=0
            )
        else:
            each = self.images // self.clients
            dataset = synthetic(self.clients * (each + TESTED))
            held = np.arange(len(dataset.images)).reshape(self.clients, -1)
            federation = Federation(train=[h[:each] for h in held], test=[h[each:] for h in held])
        return Task(
            dataset,
            federation,
            Factory(self.model, dict(self.options)),
            objectives.get("labels"),
            views=parse_augment(LIGHT),
        )


def synthetic(count: int) -> Dataset:
    """Ten patterns under noise, as bytes: uint8 [count, 3, 32, 32]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(256, size, generator=generator, dtype=torch.int16)

    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = (77 * draw(CLASSES, *SHAPE)[labels].int() + 179 * draw(count, *SHAPE).int()) >> 8
    return Dataset(
        name="synthetic",
        images=images.to(torch.uint8),
        labels=labels,
        test=torch.zeros(count, dtype=torch.bool),
        classes=tuple(map(str, range(CLASSES))),
    )


def steps_and_images(sizes: list[int], batch: int, *, drop_last: bool) -> tuple[int, int]:
    """Steps of an epoch and images that they see; fedloom joins a remainder of one to the batch before it."""
    if drop_last:
        return sum(size // batch for size in sizes), sum(size // batch * batch for size in sizes)
    steps = sum(max(1, -(-size // batch) - (size % batch == 1)) for size in sizes)
    return steps, sum(sizes)


class Clock:
    """Times rounds, the device's work included."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.begin = self.now()

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return perf_counter()

    def time(self, work: Callable[[], object]) -> float:
        start = self.now()
        work()
        return self.now() - start

    def memory(self) -> float | None:
        """Gigabytes that torch has reserved at most."""
        return torch.cuda.max_memory_reserved() / 1e9 if self.cuda else None


_SMALL = ("lanes-float32", "lanes-tf32", "lanes-bf16-cl-compile")
_LARGE = ("lanes-bf16-cl",)
_CNN2 = (("dropout", 0.0),)

WORKS = {
    work.letter: work
    for work in (
        Work(
            "A", "20 clients sized by Dir(0.1), cnn2, batch 16", 20, 45_000, 16, "cnn2", _CNN2,
            dirichlet=True, variants=_SMALL, peers=("pfllib", "fluke", "flower"),
        ),
        Work(
            "B", "100 even clients, cnn2, batch 16", 100, 45_000, 16, "cnn2", _CNN2,
            variants=(*_SMALL, "lanes-bf16-compile-cohort50"), peers=("pfllib",),
        ),
        Work(
            "C", "10 clients, ResNet-18, batch 64", 10, 12_800, 64, "resnet18",
            variants=(*_LARGE, "lanes-bf16-cl-compile"),
        ),
        Work(
            "D", "4 clients, ResNet-34 with RepPer's SupCon, batch 2 × 256", 4, 10_240, 256, "resnet34",
            method="repper", lr=0.05, views=2, variants=_LARGE,
        ),
        Work(
            "E", "10 clients, FedIntR's cnn3 with its regulariser, batch 512", 10, 51_200, 512, "cnn3",
            method="fedintr", variants=("lanes-float32", "lanes-tf32-cl", "lanes-bf16-cl", "lanes-tf32-cl-compile"),
        ),
    )
}  # fmt: skip
