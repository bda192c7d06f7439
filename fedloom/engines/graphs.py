"""Training steps as CUDA graphs: captured once per lane, call site and batch size, replayed over the same memory."""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.recording import CaptureError, NoPythonReads, Watch, owned, refuse_rebound_parts, undone
from fedloom.engines.tracing import Compiled, compile_step
from fedloom.lane import Lane, Site
from fedloom.plan import Indices, Plan

UNROLL = (16, 8, 4, 2, 1)
"""Steps of one graph: the most first, then what is left over."""
LAST = 16
"""So many steps before the end of a job its lane prepares the next one."""
GRAPHS = 32
"""Graphs that a call site of a lane has at most; the one that was not used for the longest time goes first."""

Step = Callable[[Indices], None]


@dataclass
class Shared:
    """What the lanes of an engine have in common."""

    compile: bool = False
    capturing: RLock = field(default_factory=RLock)
    """Held while a lane captures or compiles: whatever waits for the whole device would break another's capture."""
    compiled: dict[Hashable, Compiled | None] = field(default_factory=dict)
    checked: set[Hashable] = field(default_factory=set)
    """Call sites whose steps are known to be fit for capturing."""
    eager: set[Hashable] = field(default_factory=set)
    """Call sites whose steps are not."""

    def give_up(self, site: Site, error: Exception) -> None:
        """This site's steps run eagerly from now on, and it says so, once."""
        with self.capturing:
            known = site.where in self.eager
            self.eager.add(site.where)
        if not known:
            warnings.warn(f"a training step cannot be captured as a CUDA graph and runs eagerly: {error}", stacklevel=2)


@dataclass
class Graph:
    """Some steps of one size, captured; their indices [batches of a step, samples] are read from the buffer."""

    graph: torch.cuda.CUDAGraph
    buffer: Tensor


class Graphs:
    """The stepper of a lane."""

    fixed_memory = True

    def __init__(self, shared: Shared):
        self._shared = shared
        self._pool: Any = None
        self.nearly_done: torch.cuda.Event | None = None
        """Happens when the last fit comes to its last steps: time to prepare what follows."""

    def run(self, lane: Lane, site: Site, step: Step, plan: Plan) -> None:
        """Takes the plan's steps, as many at once as a graph has."""
        if not plan.sizes:
            return
        refuse_rebound_parts(lane)
        cut = list(pieces(plan.sizes))
        rows = plan.index.pin_memory().to(lane.device, non_blocking=True)
        left = len(plan.sizes)
        self.nearly_done = None
        for (size, count), index in zip(cut, rows.split([size * count for size, count in cut], dim=1), strict=True):
            if self.nearly_done is None and (left <= LAST or left == count):
                self.nearly_done = torch.cuda.Event(blocking=True)
                self.nearly_done.record()
            self._take(lane, site, step, index, size, count)
            left -= count
        refuse_rebound_parts(lane)

    def _take(self, lane: Lane, site: Site, step: Step, index: Tensor, size: int, count: int) -> None:
        """`count` steps of a size, on these samples."""
        graph = self._graph(lane, site, step, index, size, count)
        if graph is None:
            for part in _split(index, size):
                step(part)
            return
        graph.buffer.copy_(index)
        graph.graph.replay()

    def _graph(self, lane: Lane, site: Site, step: Step, index: Tensor, size: int, count: int) -> Graph | None:
        """The graph of so many steps of this size; none for a single step of a new size, until that comes again."""
        if site.where in self._shared.eager:
            return None
        key = (size, count)
        known: dict[Hashable, Graph | None] = site.captures
        first = key not in known and count == 1 and not any((size, more) in known for more in UNROLL)
        graph = known.pop(key, None)
        if graph is None and not first:
            graph = self._capture(lane, site, step, index, size, count)
        known[key] = graph  # as the one that was used last
        if len(known) > GRAPHS:
            torch.cuda.current_stream().synchronize()
            del known[next(iter(known))]
        return graph

    def _capture(self, lane: Lane, site: Site, step: Step, index: Tensor, size: int, count: int) -> Graph | None:
        buffer = index.clone(memory_format=torch.contiguous_format)
        parts = list(_split(buffer, size))
        with undone(lane, site):
            step(parts[0])  # warm-up: statistics come into being, libraries load what they need
            if site.where not in self._shared.checked:
                try:
                    with NoPythonReads(), Watch(owned(lane, site, (buffer,))):
                        step(parts[0])
                except CaptureError as error:
                    self._shared.give_up(site, error)
                    return None
                self._shared.checked.add(site.where)
            step = self._compiled(lane, site, step, parts[0], count)
            torch.cuda.current_stream().synchronize()
            with self._shared.capturing:
                try:
                    return Graph(self._record(lane, step, parts), buffer)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    failure = error
        self._shared.give_up(site, failure)
        return None

    def _record(self, lane: Lane, step: Step, parts: list[Indices]) -> torch.cuda.CUDAGraph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(lane.generator)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for part in parts:
                step(part)
        except BaseException:
            with suppress(RuntimeError):  # the first error says what happened
                graph.capture_end()
            # A capture that breaks off leaves its generator unusable, and with it the graphs that it is part of.
            lane.renew_generator()
            for other in lane.sites.values():
                other.captures.clear()
            raise
        graph.capture_end()
        return graph

    def _compiled(self, lane: Lane, site: Site, step: Step, indices: Indices, count: int) -> Step:
        """The step through torch.compile, once for all lanes, if there are enough of them to be worth it."""
        if not self._shared.compile:
            return step
        key = (site.where, len(indices[0]), None if site.data is None else site.data[0].shape)
        with self._shared.capturing:
            if key not in self._shared.compiled and count > 1:
                self._shared.compiled[key] = self._compile(lane, site, step, indices)
            compiled = self._shared.compiled.get(key)
            if compiled is None:
                return step
            bound = compiled.bind(lane, site)
            bound(indices)  # warm-up: the first call tunes kernels
        return bound

    def _compile(self, lane: Lane, site: Site, step: Step, indices: Indices) -> Compiled | None:
        try:
            return compile_step(lane, site, step, indices)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch.compile fails in many ways, none of which should end a run
            warnings.warn(f"engine.compile: a training step runs uncompiled: {error}", stacklevel=2)
            return None


def pieces(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of steps of one size, cut into as many as graphs have: (size, steps)."""
    for size, run in groupby(sizes):
        left = len(list(run))
        for count in UNROLL:
            yield from [(size, count)] * (left // count)
            left %= count


def _split(index: Tensor, size: int) -> Iterator[Indices]:
    """What each step takes."""
    return (tuple(part) for part in index.split(size, dim=1))
