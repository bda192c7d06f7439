"""A plan's samples on the GPU, in memory of a fixed place, from which every graph takes the next ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

STAGES = 4
"""Plans that may be on their way to the GPU at once."""


class Feed:
    """Where a call site's steps find their samples.

    One copy brings a plan, with the position at which reading begins. It leaves from pinned memory, which is written
    again only after the copy that read it.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self._block = torch.zeros(1 + capacity, dtype=torch.int64, device=device)
        self._position, self._samples = self._block[0], self._block[1:]
        self._offsets = torch.arange(capacity, device=device)
        stages = [(torch.zeros(1 + capacity, dtype=torch.int64, pin_memory=True), torch.cuda.Event(blocking=True))
                  for _ in range(STAGES)]  # fmt: skip
        self._stages = cycle([(pinned, pinned.numpy(), copied) for pinned, copied in stages])

    def fill(self, values: np.ndarray) -> None:
        """A plan's samples, from the first on; in the current stream."""
        pinned, staged, copied = next(self._stages)
        copied.synchronize()
        end = 1 + len(values)
        staged[1:end] = values
        self._block[:end].copy_(pinned[:end], non_blocking=True)
        copied.record()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever is taken inside is there to be taken again."""
        before = self._position.clone()
        yield
        self._position.copy_(before)

    def ahead(self, count: int) -> Tensor:
        """The next samples, which stay the next."""
        return self._samples.index_select(0, self._position + self._offsets[:count])

    def take(self, count: int) -> Tensor:
        """The next samples."""
        taken = self.ahead(count)
        self._position.add_(count)
        return taken
