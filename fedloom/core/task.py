"""The task: the dataset, its division among clients, the network and the objective. Independent of methods."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
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
    """Images, labels and groups of all samples. Validated on creation."""

    name: str
    images: Tensor
    """uint8 [N, C, H, W]"""
    labels: Tensor
    """int64 [N]"""
    test: Tensor
    """bool [N]: whether a sample belongs to the official test set (all False if there is none)"""
    classes: tuple[str, ...]
    groups: Tensor | None = None
    """int64 [N]: domain or style of a sample, or its natural client"""
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _expect(self.name, "images", self.images, torch.uint8, 4)
        count = len(self.images)
        if count == 0:
            raise UserError(f"dataset '{self.name}': it has no images")
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
            f"but has dtype {value.dtype} and shape {tuple(value.shape)}"
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
    """The division of a dataset among clients: positions of each client's samples."""

    train: list[np.ndarray]
    """Training samples of each client, int64, ascending."""
    test: list[np.ndarray]
    """Test samples of each client, int64, ascending. Clients with the same test set share one array."""
    newcomers: tuple[int, ...] = ()
    """Clients that are held out of training."""
    notes: tuple[str, ...] = ()
    """Remarks about the division that are shown to the user."""
    validation: list[np.ndarray] = field(default_factory=list)
    """Validation samples of each client, int64, ascending; empty arrays by default."""

    def __post_init__(self) -> None:
        if not self.validation:
            object.__setattr__(self, "validation", [np.empty(0, np.int64)] * len(self.train))

    def __len__(self) -> int:
        return len(self.train)

    @property
    def validates(self) -> bool:
        """Whether any client has validation samples."""
        return any(len(part) for part in self.validation)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one array: pickling a hundred thousand small arrays takes many times as long."""
        every = (*self.train, *self.test, *self.validation)
        distinct = {id(part): part for part in every}
        place = {key: i for i, key in enumerate(distinct)}
        uses = np.array([place[id(part)] for part in every], np.int64)
        ends = np.cumsum([len(part) for part in distinct.values()])
        return _restored, (np.concatenate([*distinct.values()]), ends, uses, self.newcomers, self.notes)


def _restored(
    positions: np.ndarray, ends: np.ndarray, uses: np.ndarray, newcomers: tuple[int, ...], notes: tuple[str, ...]
) -> Federation:
    distinct = np.split(positions, ends[:-1])
    parts = [distinct[i] for i in uses]
    clients = len(parts) // 3
    return Federation(parts[:clients], parts[clients : 2 * clients], newcomers, notes, parts[2 * clients :])


@dataclass(frozen=True)
class ImageFormat:
    """Input format of a trained model: classes, image shape, and normalisation."""

    classes: tuple[str, ...]
    shape: Shape
    """Channels, height, width."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, task: "Task") -> "ImageFormat":
        """Return the format of a task's images."""
        mean, std = channel_statistics(task.dataset, task.normalise)
        return cls(task.dataset.classes, task.shape, tuple(mean.flatten().tolist()), tuple(std.flatten().tolist()))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ImageFormat":
        """Return the format described by such a dictionary.

        Raises:
            UserError: Mean and standard deviation do not have one entry per channel.
        """
        form = cls(**{name: tuple(values[name]) for name in ("classes", "shape", "mean", "std")})
        if not len(form.mean) == len(form.std) == form.shape[0]:
            raise UserError(f"mean and std must have {form.shape[0]} entries, one per channel of the images")
        return form


EVERYONE = -1
"""Client number that stands for the data of all clients, for central training."""


@dataclass(frozen=True)
class Task:
    """Everything about a learning problem except the method: data, clients, network and objective.

    Attributes:
        dataset: All samples.
        federation: The division of the samples among clients.
        network: Creates the network.
        objective: The training objective.
        augment: Augmentation of `batch.x`.
        views: Augmentation of `batch.views`.
        normalise: `half` (mean and standard deviation 0.5) or `channels` (measured per channel).
        elsewhere: Whether the images are stored at other organisations; then only their numbers are known here.

    Example:
        >>> def build(self, task):
        ...     return {"model": task.model(), "prototypes": torch.zeros(task.classes, task.features)}
    """

    dataset: Dataset
    federation: Federation
    network: ModelFactory
    objective: Objective
    augment: Augmentation | None = None
    views: Augmentation | None = None
    normalise: str = "half"
    elsewhere: bool = False

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.classes)

    @property
    def shape(self) -> Shape:
        """Channels, height and width of an image."""
        channels, height, width = self.dataset.images.shape[1:]
        return channels, height, width

    @property
    def clients(self) -> int:
        """Number of clients, including newcomers."""
        return len(self.federation.train)

    def model(self) -> Any:
        """Return a freshly initialised network with the head that the objective trains.

        Returns:
            A module with the submodules `extractor` and `head`.
        """
        return self.objective.equip(self.network(self.shape, self.classes))

    @cached_property
    def features(self) -> int:
        """Width of the representation."""
        with torch.random.fork_rng(devices=[]):
            return int(self.model().features)

    @cached_property
    def largest_client(self) -> int:
        """Number of training samples of the largest client."""
        return max(len(samples) for samples in self.federation.train)

    @cached_property
    def _everything(self) -> np.ndarray:
        held_out = set(self.federation.newcomers)
        return np.concatenate([s for c, s in enumerate(self.federation.train) if c not in held_out])

    def samples(self, client: int) -> np.ndarray:
        """Return the positions of a client's training samples.

        Args:
            client: The client's number, or -1 for the samples of all clients.
        """
        return self._everything if client == EVERYONE else self.federation.train[client]

    @cached_property
    def pixels(self) -> Pixels:
        """The dataset with its normalisation and augmentation, on the CPU."""
        mean, std = channel_statistics(self.dataset, self.normalise)
        return Pixels(self.dataset.images, self.dataset.labels, mean, std, self.augment, self.views)


def longest_first(task: Task, clients: Iterable[int]) -> list[int]:
    """Sort clients by descending number of training samples: the order of jobs and of summation."""
    return sorted(clients, key=lambda c: (-len(task.samples(c)), c))


def channel_statistics(dataset: Dataset, how: str) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel: 0.5 (`half`), or measured on up to 10,000 training images."""
    channels = dataset.images.shape[1]
    if how == "half":
        return torch.full((channels, 1, 1), 0.5), torch.full((channels, 1, 1), 0.5)
    train = (~dataset.test).nonzero()[:, 0]
    some = dataset.images[train[:: max(1, len(train) // 10_000)]].double().div(255)
    mean, std = some.mean((0, 2, 3)), some.std((0, 2, 3))
    return mean.float().reshape(-1, 1, 1), std.float().clamp_min(1e-3).reshape(-1, 1, 1)


def group_of_clients(task: Task) -> list[int]:
    """Return the style (or other group of the dataset) of each client; 0 for all clients if there are no groups."""
    groups = task.dataset.groups
    if groups is None:
        return [0] * task.clients
    return [int(groups[samples[0]]) if len(samples) else -1 for samples in task.federation.train]


COPIES = 4
"""Minimum number of copies of a network: server state, client's parts, received parts, initial values."""


def refuse_model_without_room(task: Task) -> None:
    """Check that the network fits into memory, by building it on torch's meta device, where nothing is allocated.

    Raises:
        UserError: The network is too large.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            tensors = list(task.model().state_dict().values())
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            return  # the error is reported when the network is built on a real device
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} its size overflows; choose smaller options"
        ) from None
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    room = free_memory()
    if room is not None and COPIES * size > room:
        pixels = "×".join(map(str, task.shape))
        raise UserError(
            f"model.name = '{task.network.name}': with {_options(task)} and images of {pixels} it takes "
            f"{gigabytes(size)}, {COPIES} times over, but only {gigabytes(room)} of memory are free; choose a "
            "smaller model or data.size"
        )


def _options(task: Task) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in task.network.options.items())
    return f"{{{options}}}" if options else "its defaults"
