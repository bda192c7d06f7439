"""Workloads of the benchmarks: clients, images, network and method; and shared functions for measurements."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fedloom import Recipe, Task, objectives
from fedloom.core import trusted_code
from fedloom.data import Dataset, Federation, federate
from fedloom.data.augment import parse_augment
from fedloom.experiment.sampling import Sampling
from fedloom.models import Factory, Shape, SplitModel, build

TESTED, CHUNK = 16, 50_000
DROPOUT_CNN = f"{Path(__file__).resolve().with_name('network.py')}:DropoutCNN"
LIGHT = ("crop:4", "flip")
TRAINED = 0.75
"""Fraction of a client's images used for training, if sizes are drawn from Dir(0.1)."""
SPREAD = 0.5
"""Standard deviation of the logarithm of uneven clients' sizes: half of the clients have 0.63 to 1.24 of the mean."""


@dataclass(frozen=True)
class Work:
    """A workload: a round of training; `images` is the number of training images of all its clients together."""

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
    per_round: int | None = None
    """Number of clients sampled for each round; None for all clients."""
    uneven: bool = False
    """Whether sizes are drawn from a log-normal distribution; `images` is then the average of a round."""
    shared_test: int = 0
    """Number of test images that all clients share; 0 if every client has a few separate ones."""
    shape: Shape = (3, 32, 32)
    classes: int = 10
    total_rounds: int = 0
    """Number of rounds of the whole training."""
    variants: tuple[str, ...] = ()
    """fedloom's contestants in addition to `inline`."""
    peers: tuple[str, ...] = ()
    """Other libraries that run this workload."""

    @property
    def taking_part(self) -> int:
        """Number of clients in a round."""
        return self.per_round or self.clients

    def scaled(self, scale: float) -> "Work":
        """Return a smaller workload for a trial: with smaller clients, or with fewer if clients are sampled."""
        if scale == 1:
            return self
        if self.per_round is None:
            each = max(4, round(self.images * scale / self.clients))
            return replace(self, images=each * self.clients, batch=min(self.batch, each))
        per_round = max(2, round(self.per_round * scale))
        return replace(
            self,
            clients=max(2 * per_round, round(self.clients * scale)),
            per_round=per_round,
            images=self.images // self.per_round * per_round,
            shared_test=max(TESTED, round(self.shared_test * scale)),
            total_rounds=max(2, round(self.total_rounds * scale)),
        )

    def network(self) -> SplitModel:
        """Return the network, newly initialised."""
        return build(self.model, shape=self.shape, classes=self.classes, **dict(self.options))

    def recipe(self, **sections: Any) -> dict[str, Any]:
        """Return the training as a recipe's values, without the data, merged with the given sections."""
        values: dict[str, Any] = {
            "method": self.method,
            "model": {"name": self.model, **dict(self.options)},
            "training": {
                "batch_size": self.batch,
                "fraction": self.taking_part / self.clients,
                "optimizer": {"lr": self.lr},
            },
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
        return values

    def task(self) -> Task:
        """Return a task with synthetic, learnable images."""
        trusted_code.allow(self.model)
        dataset, federation = self.federation()
        return Task(
            dataset,
            federation,
            Factory(self.model, dict(self.options)),
            objectives.get("labels"),
            views=parse_augment(LIGHT),
        )

    def federation(self) -> tuple[Dataset, Federation]:
        """Return the images and the clients' samples."""
        if self.dirichlet:
            dataset = self.synthetic(round(self.images / TRAINED))
            least = min(10, max(1, len(dataset.inputs) // (20 * self.clients)))
            split = f"pooled:{TRAINED}"
            return dataset, federate(
                dataset, clients=self.clients, partition="dirichlet:0.1", split=split, minimum=least, seed=0
            )
        if self.shared_test:
            ends = np.cumsum(self.sizes())
            dataset = self.synthetic(int(ends[-1]) + self.shared_test, test=self.shared_test)
            *train, test = np.split(np.arange(len(dataset)), ends)
            return dataset, Federation(train=train, test=[test] * self.clients)
        each = self.images // self.clients
        dataset = self.synthetic(self.clients * (each + TESTED))
        held = np.arange(len(dataset.inputs)).reshape(self.clients, -1)
        return dataset, Federation(train=[h[:each] for h in held], test=[h[each:] for h in held])

    def sizes(self) -> list[int]:
        """Return each client's number of training images, if clients are sampled."""
        mean = self.images // self.taking_part
        if not self.uneven:
            return [mean] * self.clients
        drawn = np.random.default_rng(0).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, self.clients)
        return np.clip(drawn.round(), mean // 8, 4 * mean).astype(int).tolist()

    def draws(self, task: Task, rounds: int) -> list[list[int]]:
        """Return the clients that fedloom samples in each of the first rounds."""
        sampling = Sampling(Recipe.parse(self.recipe(), trust_code=True), task, pooled=False)
        return [sampling.draw(round) for round in range(1, rounds + 1)]

    def synthetic(self, count: int, test: int = 0) -> Dataset:
        """Return synthetic images of this workload's shape; the last `test` of them are the test set."""
        return synthetic(count, self.shape, self.classes, test)


def synthetic(count: int, shape: Shape = (3, 32, 32), classes: int = 10, test: int = 0) -> Dataset:
    """Return noisy images with a pattern for each class, as uint8 [count, *shape]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(256, size, generator=generator, dtype=torch.int16)

    labels = torch.randint(classes, (count,), generator=generator)
    patterns = 77 * draw(classes, *shape).int()
    images = torch.empty(count, *shape, dtype=torch.uint8)
    for some in torch.arange(count).split(CHUNK):
        images[some] = ((patterns[labels[some]] + 179 * draw(len(some), *shape).int()) >> 8).to(torch.uint8)
    return Dataset(
        name="synthetic",
        inputs=images,
        labels=labels,
        test=torch.arange(count) >= count - test,
        classes=tuple(map(str, range(classes))),
    )


def steps_and_images(task: Task, draws: list[list[int]], batch: int, *, drop_last: bool) -> tuple[float, float]:
    """Return the average numbers of steps and of images per round, for rounds with these clients.

    fedloom adds a remainder of one image to the last batch.
    """
    sizes = [len(task.samples(client)) for drawn in draws for client in drawn]
    if drop_last:
        steps, images = sum(size // batch for size in sizes), sum(size // batch * batch for size in sizes)
    else:
        steps, images = sum(max(1, -(-size // batch) - (size % batch == 1)) for size in sizes), sum(sizes)
    return steps / len(draws), images / len(draws)


class Clock:
    """Timer that waits for the device's work."""

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
        """Return the peak memory reserved by torch in gigabytes; None on a CPU."""
        return torch.cuda.max_memory_reserved() / 1e9 if self.cuda else None


_SMALL = ("lanes-float32", "lanes-tf32", "lanes-bf16-cl-compile")
_LARGE = ("lanes-bf16-cl", "lanes-bf16-cl-compile")
_MANY = ("auto", "lanes-float32", "lanes-tf32", "lanes-tf32-compile", "lanes-bf16-compile")
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
            variants=_LARGE,
        ),
        Work(
            "D", "4 clients, ResNet-34 with RepPer's SupCon, batch 2 × 256", 4, 10_240, 256, "resnet34",
            method="repper", lr=0.05, views=2, variants=_LARGE,
        ),
        Work(
            "E", "10 clients, FedIntR's cnn3 with its regulariser, batch 512", 10, 51_200, 512, "cnn3",
            method="fedintr", variants=("lanes-float32", "lanes-tf32-cl", "lanes-bf16-cl", "lanes-tf32-cl-compile"),
        ),
        Work(
            "P", "50 of 1,000 even clients of 50 images, CNN with dropout, batch 10 (pfl-research's CIFAR-10)",
            1000, 2_500, 10, DROPOUT_CNN, lr=0.1, per_round=50, shared_test=10_000, total_rounds=1500,
            variants=_MANY, peers=("pfl",),
        ),
        Work(
            "Q", "10 of 3,400 uneven clients, CNN with dropout of 62 classes, 28×28×1, batch 20 (FLUTE, FedJAX)",
            3400, 1_500, 20, DROPOUT_CNN, lr=0.1, per_round=10, uneven=True, shared_test=10_000,
            shape=(1, 28, 28), classes=62, variants=_MANY,
        ),
    )
}  # fmt: skip
