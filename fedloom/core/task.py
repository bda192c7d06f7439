"""The task: the dataset, its division among clients, the network and the objective. Independent of methods."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Augmentation, StoredSamples
from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.input_format import InputFormat
from fedloom.core.limits import free_memory, gigabytes
from fedloom.core.protocols import ModelFactory, Objective, Shape

Normalisation = Literal["half", "given", "channels", "federated", "none"]
"""Normalisation of inputs: mean and standard deviation 0.5 (`half`), those of the recipe (`given`), measured per
channel on all training data in one place (`channels`) or from the sums of clients (`federated`, which the ledger
lists), or `none`."""


CONSTANT = 1e-6
"""Standard deviation relative to the mean up to which a channel counts as constant and is not scaled."""
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
        given: Mean and standard deviation for `normalise="given"`, one number each or one per channel.
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
    given: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    def __post_init__(self) -> None:
        _refuse_other_labels(self.dataset, self.objective)

    @property
    def classes(self) -> int:
        """Number of classes, or of labels if a sample can have several."""
        return len(self.dataset.classes)

    @property
    def outputs(self) -> int:
        """Number of outputs of a head: one per class or label, or a single one with the objective `binary`."""
        return self.objective.outputs(self.classes)

    @property
    def shape(self) -> Shape:
        """Shape of a sample: channels, height and width of an image."""
        return tuple(self.dataset.inputs.shape[1:])

    @property
    def clients(self) -> int:
        """Number of clients, including newcomers."""
        return len(self.federation.train)

    def model(self) -> Any:
        """Return a freshly initialised network with the head that the objective trains.

        Returns:
            A module with the submodules `extractor` and `head`.
        """
        return self.objective.equip(self.network(self.shape, self.outputs))

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
        if self.normalisation == "given":
            return self._given(0, shape), self._given(1, shape)
        mean, std = self._measured_statistics()
        constant = std <= CONSTANT * mean.abs()
        return mean.float().reshape(shape), std.masked_fill(constant, 1).float().reshape(shape)

    def _given(self, which: int, shape: tuple[int, ...]) -> Tensor:
        values, name = self.given[which], ("mean", "std")[which]
        if len(values) not in (1, shape[0]):
            raise UserError(f"data.{name}: has {len(values)} numbers; give one, or {shape[0]}, one per channel")
        return torch.tensor(values).reshape(-1, *shape[1:]).expand(shape).contiguous()

    @property
    def input_format(self) -> InputFormat:
        """The format of the inputs."""
        mean, std = (tuple(values.flatten().tolist()) for values in self.statistics)
        return InputFormat(self.dataset.classes, self.shape, mean, std, "uint8" if self.dataset.bytes else "float32")

    def _measured_statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation on the training samples of all clients but newcomers.

        In a federation this takes one message per client: the number, sum and sum of squares of its inputs per channel.
        """
        inputs, samples, scale = self.dataset.inputs, torch.from_numpy(self._everything), self.dataset.scale
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
    def stored(self) -> StoredSamples:
        """The dataset with its normalisation and augmentation, on the CPU."""
        mean, std = self.statistics
        return StoredSamples(self.dataset.inputs, self.dataset.labels, mean, std, self.augment, self.views)


def _refuse_other_labels(dataset: Dataset, objective: Objective) -> None:
    """Raise a UserError if the objective does not fit the labels."""
    objective.outputs(len(dataset.classes))
    if dataset.multilabel and not objective.multilabel:
        raise UserError(
            f"objective.name = '{objective.name}': it needs one class per sample, but the labels of dataset "
            f"'{dataset.name}' are [N, {len(dataset.classes)}], several per sample; use objective.name = multilabel"
        )
    if objective.multilabel and not dataset.multilabel:
        raise UserError(
            f"objective.name = '{objective.name}': it needs labels [N, L] of 0 and 1, but dataset '{dataset.name}' has "
            "one class per sample; use objective.name = labels"
        )


def longest_first(task: Task, clients: Iterable[int]) -> list[int]:
    """Sort clients by descending number of training samples: the order of jobs and of summation."""
    return sorted(clients, key=lambda c: (-len(task.samples(c)), c))


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
