"""The task: the dataset, its division among clients, the network and the objective. Independent of methods."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Augmentation, Pixels
from fedloom.core.errors import UserError
from fedloom.core.limits import free_memory, gigabytes
from fedloom.core.protocols import ModelFactory, Objective, Shape

Normalisation = Literal["half", "channels", "federated", "none"]
"""Normalisation of inputs: mean and standard deviation 0.5 (`half`), measured per channel on all training data in one
place (`channels`) or from the sums of training clients (`federated`, which the ledger lists), or `none`."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs, labels and groups of all samples. Validated on creation; see also `fedloom.data.from_arrays`."""

    name: str
    images: Tensor
    """uint8 images [N, C, H, W], or float32 inputs of any shape [N, …] without NaN or infinity"""
    labels: Tensor
    """int64 [N]"""
    test: Tensor
    """bool [N]: whether a sample belongs to the official test set (all False if there is none)"""
    classes: tuple[str, ...]
    groups: Tensor | None = None
    """int64 [N]: domain or style of a sample, or its natural client"""
    group_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks about the files that are shown to the user, such as pictures that were left out."""

    def __post_init__(self) -> None:
        count = len(self.images)
        if count == 0:
            raise UserError(f"dataset '{self.name}': it has no samples")
        _expect_inputs(self.name, self.images)
        _expect(self.name, "labels", self.labels, torch.int64, 1, count)
        _expect(self.name, "test", self.test, torch.bool, 1, count)
        _expect_range(self.name, "label", self.labels, len(self.classes), "classes")
        if self.groups is not None:
            _expect(self.name, "groups", self.groups, torch.int64, 1, count)
            _expect_range(self.name, "group", self.groups, len(self.group_names), "group names")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def bytes(self) -> bool:
        """Whether inputs are images of bytes."""
        return self.images.dtype == torch.uint8

    @property
    def scale(self) -> int:
        """Divisor that brings stored values to the range of the network: 255 for bytes, else 1."""
        return 255 if self.bytes else 1


def _expect_inputs(name: str, inputs: Tensor) -> None:
    if inputs.dtype == torch.uint8 and inputs.dim() == 4:
        return
    if inputs.dtype != torch.float32 or inputs.dim() < 2:
        raise UserError(
            f"dataset '{name}': inputs must be uint8 images [N, C, H, W] or float32 [N, …], but have dtype "
            f"{inputs.dtype} and shape {tuple(inputs.shape)}; fedloom.data.from_arrays converts other arrays"
        )
    bad = [i + start for start in range(0, len(inputs), 8192) for i in _not_finite(inputs[start : start + 8192])]
    if bad:
        raise UserError(
            f"dataset '{name}': {len(bad)} of {len(inputs)} samples contain NaN or infinity, first sample {bad[0]}; "
            "remove them or fill the missing values"
        )


def _not_finite(inputs: Tensor) -> list[int]:
    found: list[int] = (~inputs.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
    return found


def _expect(name: str, field: str, value: Tensor, dtype: torch.dtype, dims: int, count: int | None = None) -> None:
    if value.dtype != dtype or value.dim() != dims:
        raise UserError(
            f"dataset '{name}': {field} must be {dtype} with {dims} dimension(s), "
            f"but has dtype {value.dtype} and shape {tuple(value.shape)}"
        )
    if count is not None and len(value) != count:
        raise UserError(f"dataset '{name}': {len(value)} {field} for {count} samples")


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
    names: tuple[str, ...] = ()
    """Different names of the clients, such as those of their folders; empty if the clients have only numbers."""
    validation: list[np.ndarray] = field(default_factory=list)
    """Validation samples of each client, int64, ascending; empty arrays by default."""

    def __post_init__(self) -> None:
        if self.names and len(set(self.names)) != len(self.train):
            raise UserError(
                f"names: {len(set(self.names))} different names for {len(self.train)} clients; give each client one"
            )
        if not self.validation:
            object.__setattr__(self, "validation", [np.empty(0, np.int64)] * len(self.train))

    def __len__(self) -> int:
        return len(self.train)

    def name(self, client: int) -> str:
        """Return the name of a client; `client 3` if the clients have only numbers."""
        return self.names[client] if self.names else f"client {client}"

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
        rest = (self.newcomers, self.notes, self.names)
        return _restored, (np.concatenate([*distinct.values()]), ends, uses, *rest)


def _restored(
    positions: np.ndarray,
    ends: np.ndarray,
    uses: np.ndarray,
    newcomers: tuple[int, ...],
    notes: tuple[str, ...],
    names: tuple[str, ...],
) -> Federation:
    distinct = np.split(positions, ends[:-1])
    parts = [distinct[i] for i in uses]
    clients = len(parts) // 3
    train, test, validation = parts[:clients], parts[clients : 2 * clients], parts[2 * clients :]
    return Federation(train, test, newcomers, notes, names, validation)


@dataclass(frozen=True)
class InputFormat:
    """Input format of a trained model: classes, shape and type of a sample, and normalisation."""

    classes: tuple[str, ...]
    shape: Shape
    """Channels, height and width of images; any other shape of other inputs."""
    mean: tuple[float, ...]
    """Per entry of the first dimension: channels of images, columns of tables."""
    std: tuple[float, ...]
    dtype: Literal["uint8", "float32"] = "uint8"
    """Type of the inputs: images of bytes, which are scaled to [0, 1], or floats."""

    @classmethod
    def of(cls, task: "Task") -> "InputFormat":
        """Return the format of a task's inputs."""
        mean, std = (tuple(values.flatten().tolist()) for values in task.statistics)
        return cls(task.dataset.classes, task.shape, mean, std, "uint8" if task.dataset.bytes else "float32")

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as tensors that broadcast over samples."""
        ones = [1] * (len(self.shape) - 1)
        mean, std = (torch.tensor(values, dtype=torch.float32).reshape(-1, *ones) for values in (self.mean, self.std))
        return mean, std

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width.

        Raises:
            UserError: The model does not take images.
        """
        if self.dtype != "uint8" or len(self.shape) != 3:
            shape = ", ".join(map(str, self.shape))
            raise UserError(f"this model takes {self.dtype} inputs [B, {shape}], not image files; use it from Python")
        channels, height, width = self.shape
        return channels, height, width

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "InputFormat":
        """Return the format described by such a dictionary.

        Raises:
            UserError: Mean and standard deviation do not have one entry per channel.
        """
        lists = {name: tuple(values[name]) for name in ("classes", "shape", "mean", "std")}
        form = cls(**lists, dtype=values.get("dtype", "uint8"))
        if not len(form.mean) == len(form.std) == form.shape[0]:
            raise UserError(f"mean and std must have {form.shape[0]} entries, one per channel")
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
        normalise: See `Normalisation`. Default: `half` for images of bytes, else `federated`.
        elsewhere: Whether the inputs are stored at other organisations; then only their numbers are known here.

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
    normalise: Normalisation | None = None
    elsewhere: bool = False

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.classes)

    @property
    def shape(self) -> Shape:
        """Shape of a sample: channels, height and width of an image."""
        return tuple(self.dataset.images.shape[1:])

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

    @property
    def normalisation(self) -> Normalisation:
        """How inputs are normalised."""
        return self.normalise or ("half" if self.dataset.bytes else "federated")

    @cached_property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation per channel, as tensors that broadcast over samples."""
        shape = (self.shape[0], *[1] * (len(self.shape) - 1))
        if self.normalisation == "none":
            return torch.zeros(shape), torch.ones(shape)
        if self.normalisation == "half":
            return torch.full(shape, 0.5), torch.full(shape, 0.5)
        mean, std = (
            channel_statistics(self.dataset) if self.normalisation == "channels" else self._federated_statistics()
        )
        return mean.float().reshape(shape), std.float().clamp_min(1e-3).reshape(shape)

    def _federated_statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation on the training samples of all clients but newcomers.

        In a federation this takes one message per client: the number, sum and sum of squares of its inputs per channel.
        """
        inputs, samples, scale = self.dataset.images, torch.from_numpy(self._everything), self.dataset.scale
        count, total, squares = 0, torch.zeros(self.shape[0]).double(), torch.zeros(self.shape[0]).double()
        for part in samples.split(4096):
            values = (
                inputs[part].double().div(scale).flatten(2) if inputs.dim() > 2 else inputs[part].double()[..., None]
            )
            count += values.shape[0] * values.shape[2]
            total += values.sum((0, 2))
            squares += values.square().sum((0, 2))
        mean = total / count
        return mean, (squares / count - mean.square()).clamp_min(0).sqrt()

    @cached_property
    def pixels(self) -> Pixels:
        """The dataset with its normalisation and augmentation, on the CPU."""
        mean, std = self.statistics
        return Pixels(self.dataset.images, self.dataset.labels, mean, std, self.augment, self.views)


def longest_first(task: Task, clients: Iterable[int]) -> list[int]:
    """Sort clients by descending number of training samples: the order of jobs and of summation."""
    return sorted(clients, key=lambda c: (-len(task.samples(c)), c))


def channel_statistics(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Measure mean and standard deviation per channel on up to 10,000 samples that are not in the official test set."""
    train = (~dataset.test).nonzero()[:, 0]
    some = dataset.images[train[:: max(1, len(train) // 10_000)]].double().div(dataset.scale)
    others = (0, *range(2, some.dim()))
    return some.mean(others), some.std(others)


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
            f"model.name = '{task.network.name}': with {_options(task)} and inputs of {pixels} it needs "
            f"{COPIES} copies of {gigabytes(size)} each, but only {gigabytes(room)} of memory are free; choose a "
            "smaller model or data.size"
        )


def _options(task: Task) -> str:
    options = ", ".join(f"{name}: {value}" for name, value in task.network.options.items())
    return f"{{{options}}}" if options else "its defaults"
