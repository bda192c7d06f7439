"""Randomness is keyed, never global: (seed, round, client, purpose) gives the same numbers in any order, anywhere."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn


def key(*parts: object) -> int:
    """A 56-bit seed out of anything that prints the same each time (numbers, strings, tuples of them)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def numpy_generator(*parts: object) -> np.random.Generator:
    """NumPy's generator for this key."""
    return np.random.default_rng(key(*parts))


class Dropout(nn.Module):
    """Dropout that draws from an explicit generator, so that a client's mask depends on its key alone.

    A workspace hands its generator to every such module in its tree; without one, torch's global generator is used.
    """

    generator: torch.Generator | None = None

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes with probability p and rescales in training; the identity otherwise."""
        if not self.training or self.p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * kept.div_(1 - self.p)
