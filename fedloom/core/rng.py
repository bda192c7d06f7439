"""Randomness is keyed, never global: (seed, round, client, purpose) gives the same numbers in any order, anywhere.

A random number is a pure function of a key and a counter, computed by integer tensor operations. No generator has
state, so a recorded step has nothing to register or to restore, and CPUs and GPUs draw the same numbers: integers and
uniforms bit for bit, normals within rounding.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

Shape = Sequence[int]

# The 32-bit mixer "lowbias32" by C. Wellons: xorshift, multiply, twice; its constants as signed numbers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
STEP = np.uint64(0x9E3779B97F4A7C15)
"""splitmix64's increment."""
SMALL = 1024
"""Numbers of a small draw."""


def key(*parts: object) -> int:
    """A 56-bit seed out of anything that prints the same each time (numbers, strings, tuples of them)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def numpy_generator(*parts: object) -> np.random.Generator:
    """NumPy's generator for this key."""
    return np.random.default_rng(key(*parts))


def step_keys(seeds: np.ndarray, count: int) -> np.ndarray:
    """int64 [seeds, count]: 64-bit keys from each of these seeds (uint64) on, by splitmix64."""
    z: np.ndarray = np.arange(1, count + 1, dtype=np.uint64) * STEP + seeds[:, None]
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z.view(np.int64)


def permutation(seed: int, size: int) -> np.ndarray:
    """The numbers from 0 to size − 1 in a random order, given by this seed."""
    return np.argsort(step_keys(np.array([seed], np.uint64), size)[0], kind="stable")


class Random:
    """Random numbers on one device: what is drawn after `begin` depends on the key and on its place in the sequence.

    >>> random = Random(torch.device("cpu"))
    >>> random.begin(torch.tensor([7]))
    >>> random.uniform((2, 3)).shape
    torch.Size([2, 3])
    """

    _counters: ClassVar[dict[torch.device, list[Tensor]]] = {}
    """0, 1, 2, … by device, shared by all; outgrown ones stay, since recorded steps may read them."""

    def __init__(self, device: torch.device):
        self.device = device
        self._key: Tensor | None = None
        self._position = 0
        self._small: Tensor | None = None

    @classmethod
    def seeded(cls, *parts: object, device: torch.device | str = "cpu") -> "Random":
        """Ready to draw, with a key out of anything that prints the same each time."""
        random = cls(torch.device(device))
        random.begin(torch.from_numpy(step_keys(np.array([key(*parts)], np.uint64), 1)[0]).to(device))
        return random

    def begin(self, key: Tensor) -> None:
        """Draws from this key, an int64 tensor of one element made by `step_keys`, from now on."""
        self._key, self._position, self._small = key, 0, None

    @property
    def counters(self) -> Tensor:
        """The positions 0, 1, 2, …, int32: a compiler that saw `arange` would compute with it in its own way."""
        if self.device not in self._counters:
            self._counters[self.device] = [torch.arange(2**16, dtype=torch.int32, device=self.device)]
        return self._counters[self.device][-1]

    def bits(self, shape: Shape) -> Tensor:
        """32 random bits for each element, as int32."""
        count = math.prod(shape)
        if count > SMALL:
            return self._hashed(count).view(tuple(shape))
        # Small draws are cut from a larger one: a hash takes some 14 operations, however few the numbers.
        if self._small is None or len(self._small) < count:
            self._small = self._hashed(4 * SMALL)
        drawn, self._small = self._small[:count], self._small[count:]
        return drawn.view(tuple(shape))

    def _hashed(self, count: int) -> Tensor:
        """The bits of the next positions."""
        if self._key is None:
            raise RuntimeError("random numbers are drawn outside of a training step, where no key is known")
        start, self._position = self._position, self._position + count
        while len(self.counters) < self._position:
            more = torch.arange(2 * len(self.counters), dtype=torch.int32, device=self.device)
            self._counters[self.device].append(more)
        first, second = self._key.to(torch.int32), (self._key >> 32).to(torch.int32)
        # The key's second word enters between the two rounds: two keys do not give the same sequence, shifted.
        x = _mixed(self.counters[start : self._position] ^ first, 16, 0xFFFF).mul_(FIRST).bitwise_xor_(second)
        return _mixed(_mixed(x, 15, 0x1FFFF).mul_(SECOND), 16, 0xFFFF)

    def uniform(self, shape: Shape, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform in [low, high), float32: multiples of 2⁻²⁴, scaled (and rounded, up to `high` itself)."""
        drawn = (self.bits(shape) >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
        return drawn if (low, high) == (0.0, 1.0) else low + (high - low) * drawn

    def chosen(self, shape: Shape, p: float) -> Tensor:
        """True with probability p (rounded to a multiple of 2⁻¹⁶)."""
        if p * 2**32 > 2**32 - 1:
            return torch.ones(tuple(shape), dtype=torch.bool, device=self.device)
        count = math.prod(shape)
        if count <= SMALL:
            return self.bits(shape) < round(p * 2**32) - 2**31
        # 16 bits are enough for many numbers, and two of them come out of one hash.
        bits, limit = self._hashed(-(-count // 2)), round(p * 2**16)
        halves = torch.cat([(bits & 0xFFFF) < limit, ((bits >> 16) & 0xFFFF) < limit])
        return halves[:count].view(tuple(shape))

    def integers(self, high: int, shape: Shape) -> Tensor:
        """Whole numbers from 0 to high − 1, int64."""
        return ((self.bits(shape).long() & 0xFFFFFFFF) * high) >> 32

    def normal(self, shape: Shape) -> Tensor:
        """Standard normal numbers, by Box and Muller's transform."""
        radius = (1 - self.uniform(shape)).log().mul(-2).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()


def _mixed(x: Tensor, by: int, mask: int) -> Tensor:
    """x ^ (x >> by), the shift filled with zeros: torch's repeats the sign, so that it is masked."""
    return x ^ (x >> by).bitwise_and_(mask)


class Dropout(nn.Module):
    """Dropout whose masks depend on the client's key alone.

    A workspace hands its `Random` to every such module in its tree; without one, torch's global generator is used.
    """

    random: Random | None = None

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes with probability p and rescales in training; the identity otherwise."""
        if not self.training or self.p == 0:
            return x
        if self.random is None:
            return dropout(x, self.p)
        return torch.where(self.random.chosen(x.shape, self.p), 0, x / (1 - self.p))
