"""Batches: the samples that each training step uses, and the tensors that a loss reads."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedloom.core.rng import Random, step_keys

Augmentation = Callable[[Tensor, Random], Tensor]
"""Maps images [B, C, H, W] in [0, 1] to augmented images of the same shape. A false value means no augmentation."""
Row = Tensor
"""Input of one training step, int64: the key of its random numbers, then the sample positions, batch after batch."""
ORIGIN = "_fedloom_origin"
"""Attribute of inputs that holds where they come from."""


@dataclass
class Plan:
    """The training steps of one `fit` call: the samples and the random key of each step.

    The order of the samples and the keys are functions of `seed`.
    """

    among: np.ndarray
    """Positions of all samples to train on, int64."""
    sizes: list[int]
    """Batch size of each step."""
    seed: int
    epochs: int = 1
    batches: int = 1
    """Number of independent batches per step."""
    _drawn: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def index(self) -> np.ndarray:
        """Sample positions of all steps, int64 [batches, samples of all steps]."""
        return self._draw()[0]

    @property
    def keys(self) -> np.ndarray:
        """Random key of each step, int64 [steps]."""
        return self._draw()[1]

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        if self._drawn is None:
            draw([self])
        assert self._drawn is not None
        return self._drawn

    @property
    def samples(self) -> int:
        """Number of samples processed in all steps, counted once per batch."""
        return self.batches * self.epochs * len(self.among)

    @property
    def norms(self) -> bool:
        """Whether batch-norm layers can be trained, which needs a batch of at least two samples."""
        return max(self.sizes, default=0) > 1

    def part(self, start: int, size: int, count: int) -> np.ndarray:
        """Return the `Row` of each of `count` steps of equal size, from step `start` on, as int64 [count, row]."""
        first = sum(self.sizes[:start])
        taken = self.index[:, first : first + size * count].reshape(self.batches, count, size)
        rows = np.empty((count, 1 + self.batches * size), np.int64)
        rows[:, 0] = self.keys[start : start + count]
        rows[:, 1:] = taken.transpose(1, 0, 2).reshape(count, -1)
        return rows

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs of consecutive steps of equal size as (first step, batch size, number of steps)."""
        start = 0
        for size, run in groupby(self.sizes):
            count = len(list(run))
            yield start, size, count
            start += count

    def steps(self, device: torch.device) -> Iterator[Row]:
        """Yield the `Row` of each step as a tensor on `device`."""
        for run in self.runs():
            yield from torch.from_numpy(self.part(*run)).to(device).unbind()


def draw(plans: Sequence[Plan]) -> None:
    """Draw the sample orders and step keys of several plans, vectorised over plans of equal shape."""
    alike: dict[tuple[int, int, int, int], list[Plan]] = {}
    for plan in plans:
        if plan._drawn is None:
            alike.setdefault((len(plan.sizes), plan.batches, plan.epochs, len(plan.among)), []).append(plan)
    for (steps, *shape), group in alike.items():
        # the first keys are the steps' random keys; the samples are sorted by the others
        keys = step_keys(np.array([plan.seed for plan in group], np.uint64), steps + math.prod(shape))
        orders = np.argsort(keys[:, steps:].reshape(len(group), *shape), kind="stable")
        for plan, own, order in zip(group, keys, orders, strict=True):
            plan._drawn = plan.among[order].reshape(plan.batches, -1 if steps else 0), own[:steps]


def shuffled(samples: np.ndarray, size: int, seed: int, *, epochs: int = 1, batches: int = 1) -> Plan:
    """Return a plan that visits the samples in a new random order in every epoch.

    Args:
        samples: Positions of the samples.
        size: Batch size.
        seed: Determines orders and step keys.
        epochs: Number of passes over the samples.
        batches: Number of independent batches per step.
    """
    return Plan(samples, epochs * batch_sizes(len(samples), size), seed, epochs, batches)


def batch_sizes(samples: int, size: int) -> list[int]:
    """Return the batch sizes of one epoch. A remainder of one sample is added to the preceding batch."""
    sizes = [size] * (samples // size)
    rest = samples % size
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


@dataclass(frozen=True)
class StoredSamples:
    """A dataset on one device, and the conversion of its stored values to network inputs."""

    inputs: Tensor  # uint8 [N, C, H, W], or float32 [N, …]
    labels: Tensor  # int64 [N], or uint8 [N, L]
    mean: Tensor  # [C, 1, …]: broadcasts over samples
    std: Tensor
    augment: Augmentation | None = None
    views: Augmentation | None = None
    layout: torch.memory_format = torch.contiguous_format

    def to(self, device: torch.device, layout: torch.memory_format | None = None) -> "StoredSamples":
        """Return a copy on another device, or in another memory layout."""
        layout = (layout or self.layout) if self.inputs.dim() == 4 else torch.contiguous_format
        inputs = self.inputs.to(device, memory_format=layout)
        labels, mean, std = (tensor.to(device) for tensor in (self.labels, self.mean, self.std))
        return replace(self, inputs=inputs, labels=labels, mean=mean, std=std, layout=layout)

    def image(self, index: Tensor) -> Tensor:
        """Return inputs as floats: images of bytes in [0, 1], other inputs unchanged."""
        stored = self._rows(index).to(self.mean.dtype)
        return stored.div(255) if self.bytes else stored

    def normalise(self, image: Tensor) -> Tensor:
        """Return (input − mean) / std, computed per channel."""
        return ((image - self.mean) / self.std).contiguous(memory_format=self.layout)

    def plain(self, index: Tensor) -> Tensor:
        """Return the network's input without augmentation: stored values are normalised in one operation.

        The tensor is marked with the positions of its samples, for `origin_of`.
        """
        x = torch.addcmul(self.shift, self._rows(index), self.scale)
        if not x.is_inference():  # such tensors have no version
            x.__dict__[ORIGIN] = self, index, x._version
        return x

    def _rows(self, index: Tensor) -> Tensor:
        if self.layout is torch.contiguous_format:
            return self.inputs[index]
        return self.inputs.permute(0, 2, 3, 1)[index].permute(0, 3, 1, 2)  # index rows in memory order

    @property
    def bytes(self) -> bool:
        """Whether the stored inputs are images of bytes."""
        return self.inputs.dtype == torch.uint8

    @cached_property
    def scale(self) -> Tensor:
        """Factor applied to a stored value."""
        return 1 / (255 * self.std) if self.bytes else 1 / self.std

    @cached_property
    def shift(self) -> Tensor:
        """Offset added to a scaled value."""
        return -self.mean / self.std

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a training step may read."""
        return [self.inputs, self.labels, self.mean, self.std, self.scale, self.shift]


def origin_of(x: Tensor, stored: StoredSamples) -> Tensor | None:
    """Return the positions of the samples whose unchanged inputs `stored.plain` has returned as `x`; None for others.

    A tensor that was computed from such inputs has no origin, and neither have inputs that were changed in place.
    """
    source, index, version = x.__dict__.get(ORIGIN, (None, None, None))
    return index if source is stored and version == x._version else None


class Batch:
    """Images and labels of one training step.

    All tensors are computed on first access: labels are not read unless the loss uses `batch.y`.

    Attributes:
        size: Number of samples.

    Example:
        >>> def loss(self, client, batch):
        ...     return torch.nn.functional.cross_entropy(client.model(batch.x), batch.y)
    """

    def __init__(self, stored: StoredSamples, index: Tensor, random: Random, views: int = 2):
        self.size = len(index)
        self._stored, self._index, self._random, self._views = stored, index, random, views

    @cached_property
    def image(self) -> Tensor:
        """Images in [0, 1], without augmentation."""
        return self._stored.image(self._index)

    @cached_property
    def x(self) -> Tensor:
        """The network's input: augmented according to the recipe's `data.augment`, and normalised."""
        if not self._stored.augment:
            return self.plain
        return self._stored.normalise(self._stored.augment(self.image, self._random))

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """Independently augmented and normalised copies according to `data.views`, for contrastive losses."""
        draw = self._stored.views or (lambda image, random: image)
        return tuple(self._stored.normalise(draw(self.image, self._random)) for _ in range(self._views))

    @cached_property
    def plain(self) -> Tensor:
        """The network's input without augmentation."""
        return self._stored.plain(self._index)

    def normalise(self, image: Tensor) -> Tensor:
        """Normalise images for the network.

        Args:
            image: Images with values in [0, 1].

        Returns:
            (pixel − mean) / std per channel, with the statistics of the dataset.
        """
        return self._stored.normalise(image)

    @cached_property
    def y(self) -> Tensor:
        """Classes, int64 [B]; with several labels per sample, uint8 [B, L] of 0 and 1."""
        return self._stored.labels[self._index]


class FeatureBatch:
    """Rows of extracted features (`x`) and their labels (`y`), for `fit(…, data=(z, y))`."""

    def __init__(self, data: tuple[Tensor, Tensor], index: Tensor):
        self.size = len(index)
        self.x, self.y = data[0][index], data[1][index]
