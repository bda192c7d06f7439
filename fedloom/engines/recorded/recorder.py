"""What records steps on a device, and the buffer of random keys and sample positions that recorded steps read."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Work = Callable[[], None]
UNROLL = (16, 8, 4, 2, 1)
"""Steps per recording: the largest number first, then the remainder."""


class Recorder(Protocol):
    """Records work on a device, to be repeated."""

    unroll: tuple[int, ...]
    """Numbers of steps to record together."""
    records_single: bool
    """Whether a cohort records the steps of single clients, too, instead of taking them eagerly."""

    def capture(self, work: Work) -> Work:
        """Record the work, which has been executed once before, and return a function that repeats it."""
        ...

    def settle(self) -> None:
        """Wait until all work submitted to the device is done."""
        ...


class Feed:
    """Index buffer: the `Row`s of the next steps at a fixed address, from which recorded steps read in sequence.

    One copy to the device transfers all rows and resets the read position.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self._block = torch.zeros(1 + capacity, dtype=torch.int64, device=device)
        self.position, self._values = self._block[0], self._block[1:]
        """`position` is the read position, a 0-d tensor; captured steps advance it."""
        self._offsets = torch.arange(capacity, device=device)

    def fill(self, values: list[np.ndarray]) -> None:
        """Set the rows of all following steps, without waiting for the device."""
        staged = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), *(v.ravel() for v in values)]))
        if self._block.is_cuda:
            staged = staged.pin_memory()  # torch's allocator keeps pinned memory until it has been copied
        self._block[: len(staged)].copy_(staged, non_blocking=True)

    def seek(self, position: int) -> None:
        """Set the read position."""
        self.position.fill_(position)

    def take(self, *shape: int) -> Tensor:
        """Return the next values in this shape."""
        count = int(np.prod(shape))
        taken = self._values.index_select(0, self.position + self._offsets[:count])
        self.position.add_(count)
        return taken.view(shape)
