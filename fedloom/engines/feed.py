"""A plan's samples on the GPU, in memory of a fixed place, from which every graph takes the next ones."""

from itertools import cycle

import torch
from torch import Tensor

from fedloom.plan import Plan

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

    def fill(self, plan: Plan, stream: torch.cuda.Stream) -> None:
        """A new plan, from its first step on."""
        pinned, values, copied = next(self._stages)
        copied.synchronize()
        end = 1 + plan.samples
        values[1:end] = plan.in_order()
        self._block[:end].copy_(pinned[:end], non_blocking=True)
        copied.record(stream)

    def ahead(self, count: int) -> Tensor:
        """The next samples, which stay the next."""
        return self._samples.index_select(0, self._position + self._offsets[:count])

    def take(self, count: int) -> Tensor:
        """The next samples."""
        taken = self.ahead(count)
        self._position.add_(count)
        return taken
