"""Arguments and results of one call of `fit` or `steps`."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fedloom.core.batches import Row
from fedloom.core.state import State

Features = tuple[Tensor, Tensor]
"""Representations [N, k] and labels [N]."""


class StaleValueError(RuntimeError):
    """A step reads a Python value, which a recorded step would reuse for all clients."""


class CaptureError(RuntimeError):
    """A step does something that cannot be recorded, or a part's memory was replaced."""


@dataclass(kw_only=True, slots=True)
class FitSpec:
    """Arguments of one call of `fit` or `steps`. None means: use the recipe's `training` section."""

    step: Callable[[Row], None]
    """Takes one training step, given its row: the random key and the sample positions."""
    site: Hashable
    """Identifies the call site. Calls with equal sites share optimizers, statistics and recorded steps."""
    parts: tuple[str, ...]
    """Parts in train mode."""
    optimized: tuple[tuple[str, ...], ...]
    """Groups of parts, each with a separate optimizer."""
    name: str
    """Name of the loss or step function, by which optimizer state is kept."""
    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    purpose: str = "train"
    """Key of the random numbers, together with round, client and number of earlier calls."""
    data: Features | None = None
    """Extracted features to train on instead of the client's images."""
    batches: int = 1
    """Number of independent batches per step."""
    fraction: float = 1.0
    """Share of the samples to use, drawn at random for this call."""
    at_least: int = 0
    """Minimum number of steps, reached by training for more epochs."""
    keep: bool = False
    """Keep the optimizers' state for the client's next round, even if the recipe does not say so."""


class FitResult(dict[str, Tensor]):
    """Statistics of one `fit` or `steps` call: sample-weighted means by name, always including `loss` after a `fit`.

    The dictionary is empty if no step was taken.

    Attributes:
        steps: Number of training steps taken.
        lr: The learning rate, a 0-d tensor.

    Example:
        >>> result = client.fit("model", self.loss)
        >>> copy_(client.last, result["loss"])
    """

    def __init__(self, means: State, steps: int, lr: float, device: torch.device):
        super().__init__(means)
        self.steps = steps
        self._lr, self._device = lr, device

    @property
    def lr(self) -> Tensor:
        """The learning rate."""
        return torch.full((), self._lr, device=self._device)


@dataclass(frozen=True, eq=False)
class Code:
    """A function's code object, compared by identity: hashing a code object takes time proportional to its size."""

    code: CodeType


_known: dict[int, Code] = {}


def code_of(function: Callable[..., Any]) -> Code:
    """Return an identifier of the code of a loss or step function.

    Raises:
        StaleValueError: It is not a plain function or method, or it is a closure: a recorded step would reuse the
            captured values for all clients.
    """
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if (known := _known.get(id(code))) is not None:
        return known
    if code is None:
        raise StaleValueError(f"{function!r}: losses and steps must be plain functions or methods")
    free = set(code.co_freevars) - {"__class__"}
    if free:
        raise StaleValueError(
            f"{plain.__qualname__} closes over {', '.join(sorted(free))}: a recorded step would reuse the first "
            "client's value. Make the function a method, and store changing values in a part"
        )
    return _known.setdefault(id(code), Code(code))
