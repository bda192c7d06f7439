"""Work as a CUDA graph: its memory, its random numbers, and what becomes of them when a capture breaks off."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from fedloom.core.workspace import Workspace


class GraphMemory:
    """Memory that graphs have in common. Once none of them is left torch gives it up: the next one begins anew."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        """Where to capture."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """One that was captured there."""
        self._graphs.add(graph)

    def spoiled(self) -> None:
        """A capture broke off there: the next begins elsewhere, and torch is told if it believes to be capturing."""
        self._graphs = WeakSet()
        with suppress(RuntimeError, AttributeError):  # it knows; or is older and has another name for it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._handle)


def capture(work: Callable[[], None], drawing: Sequence[Workspace], pool: GraphMemory) -> torch.cuda.CUDAGraph:
    """The work as a graph, in whose random numbers these lanes' generators go on: each costs two calls per replay."""
    graph = torch.cuda.CUDAGraph()
    for lane in drawing:
        graph.register_generator_state(lane.generator)
    try:
        graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the first error says what happened
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException as error:
        pool.spoiled()
        # A capture that breaks off leaves its generators unusable, and with them the graphs that they are part of.
        for lane in drawing:
            lane.renew_generator()
            for site in lane.caches.values():
                site.captures.clear()
        told = str(error)
        if "CUDA error: out of memory" not in told:  # which torch's allocator tells in other words
            raise
    else:
        pool.add(graph)
        return graph
    raise torch.OutOfMemoryError(told)  # without the first error, whose frames hold memory that is needed now


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
