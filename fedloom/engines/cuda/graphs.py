"""Capture and replay of CUDA graphs, and the buffer of random keys and sample positions that captured steps read."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from fedloom.core.torch_internals import end_allocate_to_pool

Work = Callable[[], None]


class Recorder(Protocol):
    """Records work on a device, to be repeated."""

    def capture(self, work: Work) -> Work:
        """Record the work, which has been executed once before, and return a function that repeats it."""
        ...

    def settle(self) -> None:
        """Wait until all work submitted to the device is done."""
        ...


class Graphs:
    """Captures CUDA graphs in one stream. The graphs share one memory pool."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def capture(self, work: Work) -> Work:
        """Capture the work as a graph and return its replay.

        Raises:
            torch.OutOfMemoryError: The graph's memory does not fit.
            RuntimeError: The work contains something that cannot be captured.
        """
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch frees a pool together with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the informative one
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException as error:
            self._graphs = WeakSet()
            with suppress(RuntimeError):  # raised if torch has already ended the capture
                end_allocate_to_pool(torch.cuda.current_device(), self._pool)
            words = str(error)
            if "CUDA error: out of memory" not in words:
                raise
        else:
            self._graphs.add(graph)
            return graph.replay
        raise torch.OutOfMemoryError(words)  # not chained: frames of the first error hold memory that is needed now

    def settle(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()


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
