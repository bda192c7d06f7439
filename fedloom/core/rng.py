"""Keyed random numbers: (seed, round, client, purpose) gives the same numbers in any order and on any engine.

A random number is a pure function of a key and a counter, computed by integer tensor operations. There is no generator
state, so recorded steps have nothing to register or restore. CPUs and GPUs draw the same numbers: integers and uniforms
bit for bit, normals within rounding.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

Shape = Sequence[int]

# Constants of C. Wellons's 32-bit hash "lowbias32" (xorshift, multiply, twice), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
# Constants of splitmix64.
INCREMENT, MULTIPLY1, MULTIPLY2 = (
    np.uint64(constant) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
SHIFT1, SHIFT2, SHIFT3 = (np.uint64(bits) for bits in (30, 27, 31))
SMALL = 1024
"""Maximum number of elements of a small draw."""


def key(*parts: object) -> int:
    """Return a 56-bit seed derived from the `repr` of the arguments (numbers, strings, tuples of them)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def numpy_generator(*parts: object) -> np.random.Generator:
    """Return a NumPy generator seeded by `key(*parts)`."""
    return np.random.default_rng(key(*parts))


def step_keys(seeds: np.ndarray, count: int) -> np.ndarray:
    """Return 64-bit keys as int64 [seeds, count], computed from each seed (uint64) by splitmix64."""
    z: np.ndarray = _increments(count) + seeds[:, None]
    z ^= z >> SHIFT1
    z *= MULTIPLY1
    z ^= z >> SHIFT2
    z *= MULTIPLY2
    z ^= z >> SHIFT3
    return z.view(np.int64)


@lru_cache(maxsize=16)  # clients of one size need the same ones
def _increments(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.uint64) * INCREMENT


def permutation(seed: int, size: int) -> np.ndarray:
    """Return the integers from 0 to size − 1 in a random order determined by the seed."""
    return np.argsort(step_keys(np.array([seed], np.uint64), size)[0], kind="stable")


class Random:
    """Random numbers on one device, determined by a key and by the order of the draws.

    Methods use it inside training steps as `client.random`.

    Args:
        device: The device of the tensors that are drawn.

    Example:
        >>> random = Random.seeded("my experiment", 7)
        >>> random.uniform((2, 3)).shape
        torch.Size([2, 3])
    """

    _counters: ClassVar[dict[torch.device, list[Tensor]]] = {}
    """0, 1, 2, … by device, shared by all instances. Old tensors are kept, because recorded steps may read them."""

    def __init__(self, device: torch.device):
        self.device = device
        self._key: Tensor | None = None
        self._position = 0
        self._small: Tensor | None = None

    @classmethod
    def seeded(cls, *parts: object, device: torch.device | str = "cpu") -> "Random":
        """Return an instance that is ready to draw.

        Args:
            *parts: Numbers and strings that determine the key.
            device: The device of the tensors that are drawn.
        """
        random = cls(torch.device(device))
        random.begin(torch.from_numpy(step_keys(np.array([key(*parts)], np.uint64), 1)[0]).to(device))
        return random

    def begin(self, key: Tensor) -> None:
        """Start drawing from a key.

        Args:
            key: An int64 tensor of one element, as returned by `step_keys`.
        """
        self._key, self._position, self._small = key, 0, None

    @property
    def counters(self) -> Tensor:
        """The counters 0, 1, 2, … as int32; stored because torch's compiler folds `arange` into index arithmetic."""
        if self.device not in self._counters:
            self._counters[self.device] = [torch.arange(2**16, dtype=torch.int32, device=self.device)]
        return self._counters[self.device][-1]

    def bits(self, shape: Shape) -> Tensor:
        """Draw 32 random bits per element.

        Args:
            shape: Shape of the tensor.

        Returns:
            An int32 tensor.

        Raises:
            RuntimeError: No key has been set, outside of a training step.
        """
        count = math.prod(shape)
        if count > SMALL:
            return self._hashed(count).view(tuple(shape))
        # Small draws are slices of a larger one, because a hash takes about 14 operations for any size.
        if self._small is None or len(self._small) < count:
            self._small = self._hashed(4 * SMALL)
        drawn, self._small = self._small[:count], self._small[count:]
        return drawn.view(tuple(shape))

    def _hashed(self, count: int) -> Tensor:
        """Return the bits of the next `count` counters."""
        if self._key is None:
            raise RuntimeError("random numbers can be drawn inside a training step only: there is no key outside of it")
        start, self._position = self._position, self._position + count
        while len(self.counters) < self._position:
            more = torch.arange(2 * len(self.counters), dtype=torch.int32, device=self.device)
            self._counters[self.device].append(more)
        first, second = self._key.to(torch.int32), (self._key >> 32).to(torch.int32)
        # The key's second word enters between the two rounds, so that no two keys give shifted copies of a sequence.
        x = _mixed(self.counters[start : self._position] ^ first, 16, 0xFFFF).mul_(FIRST).bitwise_xor_(second)
        return _mixed(_mixed(x, 15, 0x1FFFF).mul_(SECOND), 16, 0xFFFF)

    def uniform(self, shape: Shape, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw uniform numbers.

        Args:
            shape: Shape of the tensor.
            low: Lower bound, inclusive.
            high: Upper bound, exclusive except for rounding.

        Returns:
            A float32 tensor of scaled multiples of 2⁻²⁴.
        """
        drawn = (self.bits(shape) >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
        return drawn if (low, high) == (0.0, 1.0) else low + (high - low) * drawn

    def chosen(self, shape: Shape, p: float) -> Tensor:
        """Draw booleans.

        Args:
            shape: Shape of the tensor.
            p: Probability of True, rounded to a multiple of 2⁻¹⁶.

        Returns:
            A bool tensor.
        """
        if p * 2**32 > 2**32 - 1:
            return torch.ones(tuple(shape), dtype=torch.bool, device=self.device)
        count = math.prod(shape)
        if count <= SMALL:
            return self.bits(shape) < round(p * 2**32) - 2**31
        # For large draws 16 bits per element are precise enough, so one hash serves two elements.
        bits, limit = self._hashed(-(-count // 2)), round(p * 2**16)
        halves = torch.cat([(bits & 0xFFFF) < limit, ((bits >> 16) & 0xFFFF) < limit])
        return halves[:count].view(tuple(shape))

    def integers(self, high: int, shape: Shape) -> Tensor:
        """Draw integers.

        Args:
            high: Upper bound, exclusive; the lower bound is 0.
            shape: Shape of the tensor.

        Returns:
            An int64 tensor.
        """
        return ((self.bits(shape).long() & 0xFFFFFFFF) * high) >> 32

    def normal(self, shape: Shape) -> Tensor:
        """Draw standard normal numbers by the Box-Muller transform.

        Args:
            shape: Shape of the tensor.

        Returns:
            A float32 tensor.
        """
        radius = (1 - self.uniform(shape)).log().mul(-2).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()


def _mixed(x: Tensor, by: int, mask: int) -> Tensor:
    """Return x ^ (x >> by) with a logical shift: torch's shift is arithmetic, so the sign bits are masked."""
    return x ^ (x >> by).bitwise_and_(mask)


class Dropout(nn.Module):
    """Dropout whose masks are determined by the step's random key.

    A workspace sets `random` in every such module of its tree. Without it, torch's global generator is used.
    """

    random: Random | None = None

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements with probability p and rescale the others in training; return the input in eval mode."""
        if not self.training or self.p == 0:
            return x
        if self.random is None:
            return dropout(x, self.p)
        return torch.where(self.random.chosen(self.mask_shape(x), self.p), 0, x / (1 - self.p))

    def mask_shape(self, x: Tensor) -> Shape:
        """Return the shape of the mask, which is broadcast to the input."""
        return x.shape


class ChannelDropout(Dropout):
    """Dropout of whole channels of [B, C, …], like `torch.nn.Dropout2d`, determined by the step's random key."""

    def forward(self, x: Tensor) -> Tensor:
        """Zero channels with probability p and rescale the others in training; return the input in eval mode."""
        if self.random is None and self.training and self.p:
            return torch.feature_dropout(x, self.p, True)
        return super().forward(x)

    def mask_shape(self, x: Tensor) -> Shape:
        """Return [B, C, 1, …]."""
        return (*x.shape[:2], *[1] * (x.dim() - 2))


def keyed(module: nn.Module) -> nn.Module:
    """Replace torch's dropout modules in a tree by keyed ones.

    Args:
        module: The tree; changed in place, except if it is itself a dropout module.

    Returns:
        The tree, or the replacement of a dropout module.
    """
    made: dict[nn.Module, nn.Module] = {}  # a module that is used in several places stays one module

    def replaced(inner: nn.Module) -> nn.Module:
        if (kind := _KEYED.get(type(inner))) is not None and inner not in made:
            made[inner] = kind(inner.p).train(inner.training)
        return made.get(inner, inner)

    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = replaced(child)
    return replaced(module)


_KEYED: dict[type, Any] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: ChannelDropout,
    nn.Dropout2d: ChannelDropout,
    nn.Dropout3d: ChannelDropout,
}
