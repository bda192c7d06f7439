"""What lanes find out about their results, in memory that the host reads without asking the GPU."""

import numpy as np
import torch
from torch import Tensor

from fedloom.job import Result
from fedloom.message import Message, magnitudes


class Notes:
    """A row for each of so many turns: the largest magnitude in every tensor that is sent, then the training loss."""

    def __init__(self, turns: int, sent: Message):
        self._names = list(sent.numbers)
        dtype = magnitudes(sent.numbers.values())[0].dtype if self._names else torch.float32
        self._rows = torch.zeros(turns, len(self._names) + 1, dtype=dtype, pin_memory=True)
        self._values: np.ndarray = self._rows.numpy()

    def write(self, turn: int, result: Result) -> None:
        """In the lane's stream, without waiting."""
        found: list[Tensor] = []
        if result.message is not None and self._names:
            found = magnitudes(result.message[name] for name in self._names)
        if isinstance(result.loss, Tensor):
            found.append(result.loss.to(self._rows.dtype))
        if found:
            self._rows[turn % len(self._rows), -len(found) :].copy_(torch.stack(found), non_blocking=True)

    def read(self, turn: int, result: Result) -> None:
        """When the result is ready: its loss becomes a number, and its message knows whether it is finite."""
        told = self._values[turn % len(self._rows)]
        if isinstance(result.loss, Tensor):
            result.loss = float(told[-1])
            told = told[:-1]
        if result.message is not None and self._names:
            result.message.finite = bool(np.isfinite(told[len(told) - len(self._names) :]).all())
