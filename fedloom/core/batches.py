"""Batches: which samples each step of a fit takes, and the tensors that a loss reads of them."""

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
"""Images [B, C, H, W] in [0, 1] → the same, augmented with what is drawn. A false value changes nothing."""
Row = Tensor
"""What one step takes, int64: the key of its random numbers, then the positions of its samples, batch after batch."""


@dataclass
class Plan:
    """The steps of a fit: which samples each takes, in a random order given by the seed, and its random key."""

    among: np.ndarray
    """Positions of all samples, int64."""
    sizes: list[int]
    """Samples of each step."""
    seed: int
    epochs: int = 1
    batches: int = 1
    """Independent batches that each step gets."""
    _drawn: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def index(self) -> np.ndarray:
        """int64 [batches, samples of all steps]"""
        return self._draw()[0]

    @property
    def keys(self) -> np.ndarray:
        """int64 [steps]"""
        return self._draw()[1]

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        if self._drawn is None:
            draw([self])
        assert self._drawn is not None
        return self._drawn

    @property
    def samples(self) -> int:
        """Samples of all steps, all batches counted."""
        return self.batches * self.epochs * len(self.among)

    @property
    def norms(self) -> bool:
        """Whether batch-norm can learn: one sample has no variance."""
        return max(self.sizes, default=0) > 1

    def part(self, start: int, size: int, count: int) -> np.ndarray:
        """int64 [count, row]: the rows of `count` steps of one size, from step `start` on."""
        first = sum(self.sizes[:start])
        taken = self.index[:, first : first + size * count].reshape(self.batches, count, size)
        rows = np.empty((count, 1 + self.batches * size), np.int64)
        rows[:, 0] = self.keys[start : start + count]
        rows[:, 1:] = taken.transpose(1, 0, 2).reshape(count, -1)
        return rows

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Consecutive steps of one size: (first step, size, steps)."""
        start = 0
        for size, run in groupby(self.sizes):
            count = len(list(run))
            yield start, size, count
            start += count

    def steps(self, device: torch.device) -> Iterator[Row]:
        """What each step takes, on this device."""
        for run in self.runs():
            yield from torch.from_numpy(self.part(*run)).to(device)


def draw(plans: Sequence[Plan]) -> None:
    """Draws the orders and keys of several plans: of those of one shape in one go."""
    alike: dict[tuple[int, int, int, int], list[Plan]] = {}
    for plan in plans:
        if plan._drawn is None:
            alike.setdefault((len(plan.sizes), plan.batches, plan.epochs, len(plan.among)), []).append(plan)
    for (steps, *shape), group in alike.items():
        # the keys of the steps, then those that samples are sorted by
        keys = step_keys(np.array([plan.seed for plan in group], np.uint64), steps + math.prod(shape))
        orders = np.argsort(keys[:, steps:].reshape(len(group), *shape), kind="stable")
        for plan, own, order in zip(group, keys, orders, strict=True):
            plan._drawn = plan.among[order].reshape(plan.batches, -1 if steps else 0), own[:steps]


def shuffled(samples: np.ndarray, size: int, seed: int, *, epochs: int = 1, batches: int = 1) -> Plan:
    """Every epoch in a new random order, cut into batches of exact sizes; `batches` independent ones a step."""
    return Plan(samples, epochs * batch_sizes(len(samples), size), seed, epochs, batches)


def batch_sizes(samples: int, size: int) -> list[int]:
    """Exact sizes of an epoch's batches. A remainder of one joins the batch before it."""
    sizes = [size] * (samples // size)
    rest = samples % size
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


@dataclass(frozen=True)
class Pixels:
    """A dataset on one device, with the way from stored bytes to what a network sees."""

    images: Tensor  # uint8 [N, C, H, W]
    labels: Tensor  # int64 [N]
    mean: Tensor  # [C, 1, 1]
    std: Tensor
    augment: Augmentation | None = None
    views: Augmentation | None = None
    layout: torch.memory_format = torch.contiguous_format

    def to(self, device: torch.device, layout: torch.memory_format | None = None) -> "Pixels":
        """The same on another device, or for networks that want channels last."""
        layout = layout or self.layout
        images = self.images.to(device, memory_format=layout)
        labels, mean, std = (tensor.to(device) for tensor in (self.labels, self.mean, self.std))
        return replace(self, images=images, labels=labels, mean=mean, std=std, layout=layout)

    def image(self, index: Tensor) -> Tensor:
        """Pixels in [0, 1]."""
        return self._stored(index).to(self.mean.dtype).div(255)

    def normalise(self, image: Tensor) -> Tensor:
        """(pixel − mean) / std, per channel."""
        return ((image - self.mean) / self.std).contiguous(memory_format=self.layout)

    def plain(self, index: Tensor) -> Tensor:
        """What a network sees in evaluation: normalised straight from the stored bytes, in one operation."""
        return torch.addcmul(self.shift, self._stored(index), self.scale)

    def _stored(self, index: Tensor) -> Tensor:
        if self.layout is torch.contiguous_format:
            return self.images[index]
        return self.images.permute(0, 2, 3, 1)[index].permute(0, 3, 1, 2)  # rows as they lie in memory

    @cached_property
    def scale(self) -> Tensor:
        """What a stored byte is multiplied by."""
        return 1 / (255 * self.std)

    @cached_property
    def shift(self) -> Tensor:
        """What is added to it."""
        return -self.mean / self.std

    def tensors(self) -> list[Tensor]:
        """All that a step may read."""
        return [self.images, self.labels, self.mean, self.std, self.scale, self.shift]


class Batch:
    """Images of one training step. Lazy: labels are never read unless a loss asks for them."""

    def __init__(self, pixels: Pixels, index: Tensor, random: Random, views: int = 2):
        self.size = len(index)
        self._pixels, self._index, self._random, self._views = pixels, index, random, views

    @cached_property
    def image(self) -> Tensor:
        """Pixels in [0, 1], not augmented."""
        return self._pixels.image(self._index)

    @cached_property
    def x(self) -> Tensor:
        """The network's input: augmented as the recipe's `data.augment` says, normalised."""
        if not self._pixels.augment:
            return self.plain
        return self._pixels.normalise(self._pixels.augment(self.image, self._random))

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """Independently augmented copies, as `data.views` says, for contrastive losses."""
        draw = self._pixels.views or (lambda image, random: image)
        return tuple(self._pixels.normalise(draw(self.image, self._random)) for _ in range(self._views))

    @cached_property
    def plain(self) -> Tensor:
        """The input without augmentation."""
        return self._pixels.plain(self._index)

    def normalise(self, image: Tensor) -> Tensor:
        """What a network sees of pixels in [0, 1]."""
        return self._pixels.normalise(image)

    @cached_property
    def y(self) -> Tensor:
        """Labels."""
        return self._pixels.labels[self._index]


class FeatureBatch:
    """Rows of extracted features and their labels, for `fit(…, data=(z, y))`."""

    def __init__(self, data: tuple[Tensor, Tensor], index: Tensor):
        self.size = len(index)
        self.x, self.y = data[0][index], data[1][index]
