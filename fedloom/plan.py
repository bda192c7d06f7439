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
    def samples(self) -> int:
        """Samples of all steps, all batches counted."""
        return self.index.numel()

    def steps(self, device: torch.device) -> Iterator[Indices]:
        """What each step takes, on this device."""
        rows = self.index.to(device)
        return zip(*(row.split(self.sizes) for row in rows), strict=True)


def shuffled(samples: np.ndarray, size: int, order: np.random.Generator, *, epochs: int = 1, batches: int = 1) -> Plan:
    """Every epoch in a new random order, cut into batches of exact sizes; `batches` independent ones a step."""
    drawn = [[order.permutation(len(samples)) for _ in range(batches)] for _ in range(epochs)]
    rows = [np.concatenate([samples[:0], *(samples[epoch[b]] for epoch in drawn)]) for b in range(batches)]
    return Plan(torch.from_numpy(np.stack(rows)), epochs * batch_sizes(len(samples), size))


def batch_sizes(samples: int, size: int) -> list[int]:
    """Exact sizes of an epoch's batches. A remainder of one joins the batch before it."""
    sizes = [size] * (samples // size)
    rest = samples % size
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes
