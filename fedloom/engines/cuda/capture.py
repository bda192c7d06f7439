"""Work as a CUDA graph: its memory, its random numbers, and what becomes of them when a capture breaks off."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from fedloom.core.workspace import Workspace


class Pool:
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


def capture(work: Callable[[], None], drawing: Sequence[Workspace], pool: Pool) -> torch.cuda.CUDAGraph:
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
