"""Batches: which samples each step of a fit takes, and the tensors that a loss reads of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Indices = tuple[Tensor, ...]
Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""Images [B, C, H, W] in [0, 1] → the same, augmented with draws from the generator. A false value changes nothing."""


@dataclass(frozen=True)
class Plan:
    """Positions of samples, one row for each batch that a step gets, and how many of them each step takes."""

    index: Tensor  # int64 [batches, samples of all steps], on the CPU
    sizes: list[int]

    @property
    def batches(self) -> int:
        """Independent batches that each step gets."""
        return len(self.index)

    @property
    def samples(self) -> int:
        """Samples of all steps, all batches counted."""
        return self.index.numel()

    def in_order(self) -> np.ndarray:
        """All positions, step after step; a step's batches follow each other."""
        rows: np.ndarray = self.index.numpy()
        if len(rows) == 1:
            return rows.ravel()
        ends = np.cumsum(self.sizes)
        return np.concatenate([rows[:, end - size : end].ravel() for end, size in zip(ends, self.sizes, strict=True)])

    def steps(self, device: torch.device) -> Iterator[Indices]:
        """What each step takes, on this device."""
        rows = self.index.to(device)
        return zip(*(row.split(self.sizes) for row in rows), strict=True)


def shuffled(samples: np.ndarray, size: int, order: np.random.Generator, *, epochs: int = 1, batches: int = 1) -> Plan:
    """Every epoch in a new random order, cut into batches of exact sizes; `batches` independent ones a step."""
    index = np.empty((batches, epochs, len(samples)), np.int64)
    for epoch in range(epochs):
        for batch in range(batches):
            index[batch, epoch] = samples[order.permutation(len(samples))]
    return Plan(torch.from_numpy(index.reshape(batches, -1)), epochs * batch_sizes(len(samples), size))


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

    def __init__(self, pixels: Pixels, index: Tensor, generator: torch.Generator, views: int = 2):
        self.size = len(index)
        self._pixels, self._index, self._generator, self._views = pixels, index, generator, views

    @cached_property
    def image(self) -> Tensor:
        """Pixels in [0, 1], not augmented."""
        return self._pixels.image(self._index)

    @cached_property
    def x(self) -> Tensor:
        """The network's input: augmented as the recipe's `data.augment` says, normalised."""
        if not self._pixels.augment:
            return self.plain
        return self._pixels.normalise(self._pixels.augment(self.image, self._generator))

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """Independently augmented copies, as `data.views` says, for contrastive losses."""
        draw = self._pixels.views or (lambda image, generator: image)
        return tuple(self._pixels.normalise(draw(self.image, self._generator)) for _ in range(self._views))

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
