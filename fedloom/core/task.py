"""The task: the dataset, its division among clients, the network and the objective. It knows nothing of methods."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Augmentation, Pixels
from fedloom.core.errors import UserError
from fedloom.core.limits import free_memory, gigabytes
from fedloom.core.protocols import ModelFactory, Objective, Shape


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images, labels and what is known about each sample; checked once, when it is made."""

    name: str
    images: Tensor
    """uint8 [N, C, H, W]"""
    labels: Tensor
    """int64 [N]"""
    test: Tensor
    """bool [N]: belongs to the official test set (all False where there is none)"""
    classes: tuple[str, ...]
    groups: Tensor | None = None
    """int64 [N]: domain or style of a sample, or its natural client"""
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _expect(self.name, "images", self.images, torch.uint8, 4)
        count = len(self.images)
        if count == 0:
            raise UserError(f"dataset '{self.name}': there are no images in it")
        _expect(self.name, "labels", self.labels, torch.int64, 1, count)
        _expect(self.name, "test", self.test, torch.bool, 1, count)
        _expect_range(self.name, "label", self.labels, len(self.classes), "classes")
        if self.groups is not None:
            _expect(self.name, "groups", self.groups, torch.int64, 1, count)
            _expect_range(self.name, "group", self.groups, len(self.group_names), "group names")

    def __len__(self) -> int:
        return len(self.images)


def _expect(name: str, field: str, value: Tensor, dtype: torch.dtype, dims: int, count: int | None = None) -> None:
    if value.dtype != dtype or value.dim() != dims:
        raise UserError(
            f"dataset '{name}': {field} must be {dtype} with {dims} dimension(s), "
            f"but they are {value.dtype} of shape {tuple(value.shape)}"
        )
    if count is not None and len(value) != count:
        raise UserError(f"dataset '{name}': {len(value)} {field} for {count} images")


def _expect_range(name: str, field: str, value: Tensor, count: int, things: str) -> None:
    for extreme in (int(value.min()), int(value.max())):
        if not 0 <= extreme < count:
            where = int((value == extreme).nonzero()[0])
            raise UserError(
                f"dataset '{name}': {field} {extreme} of sample {where} is out of range (0 to {count - 1}, "
                f"for {count} {things})"
            )


@dataclass(frozen=True, eq=False)
class Federation:
    """Positions into a dataset, per client."""

    train: list[np.ndarray]
    """int64, ascending"""
    test: list[np.ndarray]
    """int64, ascending; clients with the same test set share one array"""
    newcomers: tuple[int, ...] = ()
    """clients held out of training"""
    notes: tuple[str, ...] = ()
    """what was done that the user should know"""

    def __len__(self) -> int:
        return len(self.train)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as one array: a hundred thousand small ones take many times as long."""
        distinct = {id(part): part for part in (*self.train, *self.test)}
        place = {key: i for i, key in enumerate(distinct)}
        uses = np.array([place[id(part)] for part in (*self.train, *self.test)], np.int64)
        ends = np.cumsum([len(part) for part in distinct.values()])
        return _restored, (np.concatenate([*distinct.values()]), ends, uses, self.newcomers, self.notes)


def _restored(
    positions: np.ndarray, ends: np.ndarray, uses: np.ndarray, newcomers: tuple[int, ...], notes: tuple[str, ...]
) -> Federation:
    distinct = np.split(positions, ends[:-1])
    parts = [distinct[i] for i in uses]
    half = len(parts) // 2
    return Federation(parts[:half], parts[half:], newcomers, notes)


@dataclass(frozen=True)
class ImageFormat:
    """What a model was trained on: the classes, an image's shape, and how bytes become a network's input."""

    classes: tuple[str, ...]
    shape: Shape
    """Channels, height, width."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, task: "Task") -> "ImageFormat":
        """A task's."""
        mean, std = channel_statistics(task.dataset, task.normalise)
        return cls(task.dataset.classes, task.shape, tuple(mean.flatten().tolist()), tuple(std.flatten().tolist()))

    def to_json(self) -> dict[str, Any]:
        """For files."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ImageFormat":
        """The inverse.

        Raises:
            UserError: Mean and standard deviation are not those of an image's channels.
        """
        form = cls(**{name: tuple(values[name]) for name in ("classes", "shape", "mean", "std")})
        if not len(form.mean) == len(form.std) == form.shape[0]:
            raise UserError(f"mean and std of images must have {form.shape[0]} entries, one per channel")
        return form


EVERYONE = -1
"""The client that stands for all data in one place."""


@dataclass(frozen=True)
class Task:
    """Data, who holds what, the network, and what it is trained on."""

    dataset: Dataset
    federation: Federation
    network: ModelFactory
    objective: Objective
    augment: Augmentation | None = None
    views: Augmentation | None = None
    normalise: str = "half"
    elsewhere: bool = False
    """the images lie with the clients; here is only how many each has"""

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.dataset.classes)

    @property
    def shape(self) -> Shape:
        """Channels, height, width."""
        channels, height, width = self.dataset.images.shape[1:]
        return channels, height, width

    @property
    def clients(self) -> int:
        """How many clients there are, newcomers included."""
        return len(self.federation.train)

    def model(self) -> Any:
        """A freshly initialised network, with the head that the objective trains."""
        return self.objective.equip(self.network(self.shape, self.classes))

    @cached_property
    def features(self) -> int:
        """Width of the representation."""
        with torch.random.fork_rng(devices=[]):
            return int(self.model().features)

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


COPIES = 4
"""Copies of a network that a run needs at least: the server's, the client's, the received and the initial one."""


def refuse_model_without_room(task: Task) -> None:
    """Raise a UserError if the task's network does not fit into memory; it is measured on torch's meta device."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            tensors = list(task.model().state_dict().values())
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            return  # building the network reports the problem
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} it is larger than can be counted; choose "
            "smaller options"
        ) from None
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    room = free_memory()
    if room is not None and COPIES * size > room:
        pixels = "×".join(map(str, task.shape))
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} and images of {pixels} it takes "
            f"{gigabytes(size)}, {COPIES} times over; {gigabytes(room)} of memory are free: choose a smaller "
            "model or data.size"
        )


def _options(task: Task) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in task.network.options.items())
    return f"{{{options}}}" if options else "its defaults"
