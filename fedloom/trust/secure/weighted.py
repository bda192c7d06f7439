"""The weighted mean of `server.average` as a sum: what each client adds, and how the server reads the total."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.message import Message, Signature
from fedloom.core.state import State, under
from fedloom.trust.access import Averaging
from fedloom.trust.secure.ring import FixedPoint, Ring


@dataclass(frozen=True)
class Addend:
    """A tensor of the sum."""

    name: str
    kind: Literal["mean", "rows", "sum", "weight"]
    """mean: times the client's weight; rows: times row weights; sum: as it is; weight: row weights."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class WeightedSum:
    """The tensors of a weighted mean, one after another in a vector.

    A client's weight is its number of samples divided by `largest`, so that weights are at most 1. Row weights are
    divided by `largest`, too. Integer tensors are left out, because their maximum is not a sum.

    Args:
        averaging: How the method averages.
        sent: Names, types and shapes of the tensors that clients send.
    """

    def __init__(self, averaging: Averaging, sent: Signature):
        self.averaging = averaging
        self.rows = {
            name: weights
            for part, weights in averaging.rows.items()
            for name, (dtype, _) in sent.items()
            if under(name, (part,)) and dtype.is_floating_point
        }
        self.addends = [Addend(name, kind, sent[name][1], sent[name][0]) for name, kind in self._kinds(sent)]

    def _kinds(self, sent: Signature) -> Iterator[tuple[str, Literal["mean", "rows", "sum", "weight"]]]:
        for name in dict.fromkeys(self.rows.values()):
            yield name, "weight"
        for name, (dtype, _) in sent.items():
            if self.averaging.parts is not None and not under(name, self.averaging.parts):
                continue
            if under(name, self.averaging.sums):
                if name not in self.rows.values():  # the total of row weights is in the vector already
                    yield name, "sum"
            elif dtype.is_floating_point:
                yield name, "rows" if name in self.rows else "mean"

    @property
    def size(self) -> int:
        """Number of elements of the vector."""
        return sum(addend.size for addend in self.addends)

    def vector(self, message: Message, largest: int, fixed_point: FixedPoint) -> Ring:
        """Return what a client adds to the sum.

        Args:
            message: The client's message.
            largest: Number of samples that has the weight 1.
            fixed_point: Representation of numbers.

        Raises:
            MessageError: A value is beyond the range.
        """
        vector = np.empty(self.size, fixed_point.unsigned)
        for addend, place in self._places():
            value = _double(message[addend.name])
            if addend.kind == "mean":
                value = value * (1.0 if self.averaging.uniform else message.samples / largest)
            elif addend.kind == "rows":
                value = value * _as_rows(_double(message[self.rows[addend.name]]) / largest, value)
            elif addend.kind == "weight":
                value = value / largest
            vector[place] = fixed_point.encode(value.reshape(-1), addend.name)
        return vector

    def result(
        self, total: NDArray[np.float64], weight: float, largest: int, old: Mapping[str, Tensor], error: float
    ) -> tuple[State, float]:
        """Return the result of `server.average`.

        Args:
            total: The sum of the clients' vectors.
            weight: The sum of their weights.
            largest: Number of samples that has the weight 1.
            old: The server's state; it stays where there is no weight.
            error: Largest error of the total.

        Returns:
            The tensors by name, and the largest error of their elements.
        """
        values = {(a.name, a.kind): total[place].reshape(a.shape) for a, place in self._places()}
        found: State = {}
        worst = 0.0
        for addend in self.addends:
            name, value = addend.name, values[addend.name, addend.kind]
            if addend.kind == "weight":
                if not self._summed(name):
                    continue
                value, bound = value * largest, error * largest
            elif addend.kind == "rows":
                rows = _as_rows(values[self.rows[name], "weight"], value)
                held = np.broadcast_to(rows > error, value.shape)
                value = np.divide(value, rows, where=held, out=np.zeros_like(value))
                bound = _row_error(value, rows, held, error)
            elif addend.kind == "mean":
                value, bound = value / weight, error / weight
            else:
                bound = error
            worst = max(worst, bound)
            found[name] = self._settled(addend, torch.from_numpy(np.ascontiguousarray(value)), old.get(name))
            if addend.kind == "rows" and (before := old.get(name)) is not None:
                found[name] = torch.where(torch.from_numpy(held.copy()), found[name].to(before), before)
        return found, worst

    def _summed(self, name: str) -> bool:
        inside = self.averaging.parts is None or under(name, self.averaging.parts)
        return inside and under(name, self.averaging.sums)

    def _settled(self, addend: Addend, value: Tensor, before: Tensor | None) -> Tensor:
        """Return a total in the type of the server's tensor; as in a plain sum, the old value stays where it is 0."""
        dtype = addend.dtype if addend.kind in ("sum", "weight") else torch.float32 if before is None else before.dtype
        value = value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)
        if before is None:
            return value
        value = value.to(before.device)
        return torch.where(value != 0, value, before) if addend.kind in ("sum", "weight") else value

    def _places(self) -> Iterator[tuple[Addend, slice]]:
        start = 0
        for addend in self.addends:
            yield addend, slice(start, start + addend.size)
            start += addend.size


def _double(tensor: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = tensor.detach().double().cpu().numpy()
    return found


def _as_rows(weight: NDArray[np.float64], like: NDArray[np.float64]) -> NDArray[np.float64]:
    return weight.reshape(*weight.shape, *[1] * (like.ndim - weight.ndim))


def _row_error(mean: NDArray[np.float64], weight: NDArray[np.float64], held: NDArray[np.bool_], error: float) -> float:
    """Return the largest error of a quotient whose numerator and denominator have an error of up to `error`."""
    bounds = error * (1 + np.abs(mean)) / np.maximum(weight - error, np.finfo(np.float64).tiny)
    return float(bounds[held].max(initial=0.0))
