"""What lanes find out about their results, in memory that the host reads without asking the GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.job import Result
from fedloom.core.message import Message, magnitudes


class Notes:
    """A row for each of so many turns: the largest magnitude in every tensor that is sent, then the training loss."""

    def __init__(self, turns: int, sent: Message):
        self._names = list(sent.numbers)
        dtype = magnitudes(sent.numbers.values())[0].dtype if self._names else torch.float32
        pinned = torch.cuda.is_available()  # not in tests
        self._rows = torch.zeros(turns, len(self._names) + 1, dtype=dtype, pin_memory=pinned)
        self._values: np.ndarray = self._rows.numpy()

    def write(self, turns: Sequence[int], results: Sequence[Result]) -> None:
        """In the lane's stream, without waiting; what is told of several results in as few operations as of one."""
        sent = [result.message[name] for result in results if result.message is not None for name in self._names]
        told = iter(magnitudes(sent) if sent else [])
        losses = [result.loss for result in results if isinstance(result.loss, Tensor)]
        if not sent and not losses:
            return
        nothing = (sent or losses)[0].new_zeros((), dtype=self._rows.dtype)
        found: list[Tensor] = []
        for result in results:
            found += [nothing if result.message is None else next(told) for _ in self._names]
            found.append(result.loss.to(self._rows.dtype) if isinstance(result.loss, Tensor) else nothing)
        rows = torch.stack(found).view(len(results), -1)
        places = [turn % len(self._rows) for turn in turns]
        ends = [n for n in range(1, len(places) + 1) if n == len(places) or places[n] != places[n - 1] + 1]
        for start, end in zip([0, *ends], ends, strict=False):
            self._rows[places[start] : places[end - 1] + 1].copy_(rows[start:end], non_blocking=True)

    def read(self, turn: int, result: Result) -> None:
        """When the result is ready: its loss becomes a number, and its message knows whether it is finite."""
        told = self._values[turn % len(self._rows)]
        if isinstance(result.loss, Tensor):
            result.loss = float(told[-1])
        if result.message is not None and self._names:
            result.message.finite = bool(np.isfinite(told[:-1]).all())
