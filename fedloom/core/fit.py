"""One call of `fit` or `steps`: what is trained, on which samples, for how long, and what comes out of it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor

from fedloom.core.batches import Row
from fedloom.core.state import State

Features = tuple[Tensor, Tensor]
"""Representations [N, k] and labels [N]."""


class StaleValueError(RuntimeError):
    """A step reads a Python value that a recorded step would keep from its first client."""


class CaptureError(RuntimeError):
    """A step does what cannot be recorded, or a part is not where it was made."""


@dataclass(kw_only=True, slots=True)
class FitSpec:
    """The arguments of one call. Where a value is None, the recipe's `training` section decides."""

    step: Callable[[Row], None]
    """Takes one training step: the key of its random numbers and the positions of its samples."""
    site: Hashable
    """Identifies the call: calls of equal sites share optimizers, statistics and recordings."""
    parts: tuple[str, ...]
    """Parts in train mode."""
    optimized: tuple[tuple[str, ...], ...]
    """Groups of parts that have an optimizer each."""
    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    purpose: str = "train"
    """Keys the randomness, together with the round, the client and the number of earlier calls."""
    data: Features | None = None
    """Extracted features to train on instead of the client's images."""
    batches: int = 1
    """Independent batches per step."""
    fraction: float = 1.0
    """Share of the samples, drawn for this call."""
    at_least: int = 0
    """Least number of steps, reached by more epochs."""
    keep_as: str | None = None
    """Name under which the optimizers' state stays in the client's memory."""


class FitResult(dict[str, Tensor]):
    """Sample-weighted means of what the loss noted (`loss` always), the steps taken and the learning rate."""

    def __init__(self, means: State, steps: int, lr: Tensor):
        super().__init__(means)
        self.steps = steps
        self.lr = lr


@dataclass(frozen=True, eq=False)
class Code:
    """A function's code, compared by identity: hashing code itself takes as long as its text."""

    code: CodeType


_known: dict[int, Code] = {}


def code_of(function: Callable[..., Any]) -> Code:
    """Identifies a loss or a step by its code.

    Raises:
        StaleValueError: The function closes over values, which a recorded step would keep.
    """
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if (known := _known.get(id(code))) is not None:
        return known
    if code is None:
        raise StaleValueError(f"{function!r} is no plain function or method: losses and steps must be")
    free = set(code.co_freevars) - {"__class__"}
    if free:
        raise StaleValueError(
            f"{plain.__qualname__} closes over {', '.join(sorted(free))}: a recorded step would keep the first "
            "client's value. Make it a method, and what changes a part"
        )
    return _known.setdefault(id(code), Code(code))
