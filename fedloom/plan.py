"""A plan: which samples every step of a fit takes, known before the first step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Indices = tuple[Tensor, ...]


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
            return rows[0]
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
