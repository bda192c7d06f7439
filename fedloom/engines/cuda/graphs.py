"""Capture and replay of CUDA graphs."""

from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from fedloom.core.torch_internals import end_allocate_to_pool
from fedloom.engines.recorded.recorder import UNROLL, Work


class Graphs:
    """Captures CUDA graphs in one stream. The graphs share one memory pool."""

    unroll: tuple[int, ...] = UNROLL
    records_single = True

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
