"""Training steps as CUDA graphs: captured once per lane, call site and batch size, replayed over the same memory."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from threading import Lock, RLock, get_ident
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.core.batches import Indices, Plan
from fedloom.core.workspace import StepCache, Workspace
from fedloom.engines.cuda.capture import Feed, GraphMemory, capture
from fedloom.engines.cuda.tracing import Compiled, Function, compile_batched, compile_step
from fedloom.engines.recording import CaptureError, NoPythonReads, Watch, owned, refuse_rebound_parts, undone

LONG = 0.005
"""Seconds per job after which a turn was not only giving out work, but waiting for it as well."""
PATIENCE = 16
"""So many long turns of a kind, one after another, and that kind of work goes without turns from then on."""


class Turn:
    """One thread has it at a time, from the beginning of its work to the end, unless it steps aside to wait."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None
        self._since = 0.0
        self._long: Counter[str] = Counter()

    @contextmanager
    def of(self, kind: str, jobs: int = 1) -> Iterator[None]:
        """Has the turn for so many jobs, unless this kind is known to wait: others need not wait with it."""
        if self._long[kind] >= PATIENCE:
            yield
            return
        self._take()
        try:
            yield
        finally:
            if self._holder == get_ident():  # not after the end
                self._long[kind] = self._long[kind] + 1 if perf_counter() - self._since > LONG * jobs else 0
                self._give()

    def end(self) -> None:
        """If it is this thread's turn, it is over: a generator that nobody goes on with would keep it for ever."""
        if self._holder == get_ident():
            self._give()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Lets others go on for a while, if it is this thread's turn."""
        if self._holder != get_ident():
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._lock.acquire()
        self._holder, self._since = get_ident(), perf_counter()

    def _give(self) -> None:
        self._holder = None
        self._lock.release()


UNROLL = (16, 8, 4, 2, 1)
"""Steps of one graph: the most first, then what is left over."""
LAST = 16
"""So many steps before the end of a job its lane prepares the next one."""
SMALLEST = 8192
"""Samples that a call site's plans have room for from the start."""
GRAPHS = 32
"""Graphs that a call site of a lane has at most; the one that was not used for the longest time goes first."""

Step = Callable[[Indices], None]
T = TypeVar("T")


@dataclass
class Shared:
    """What the lanes of an engine have in common."""

    compile: bool = False
    turn: Turn = field(default_factory=Turn)
    capturing: RLock = field(default_factory=RLock)
    """Held while a lane captures or compiles: whatever waits for the whole device would break another's capture."""
    compiled: dict[Hashable, Compiled | None] = field(default_factory=dict)
    checked: set[Hashable] = field(default_factory=set)
    """Call sites whose steps are known to be fit for capturing."""
    eager: set[Hashable] = field(default_factory=set)
    """Call sites whose steps are not."""

    def give_up(self, site: StepCache, error: Exception) -> None:
        """This site's steps run eagerly from now on, and it says so, once."""
        with self.capturing:
            known = site.site in self.eager
            self.eager.add(site.site)
        if not known:
            warnings.warn(f"a training step cannot be captured as a CUDA graph and runs eagerly: {error}", stacklevel=2)


class Graphs:
    """The stepper of a lane, which works in this stream.

    `nearly_done` happens when a fit comes to its last steps: time to prepare what follows.
    """

    fixed_memory = True

    def __init__(self, shared: Shared, stream: torch.cuda.Stream, nearly_done: torch.cuda.Event):
        self._shared = shared
        self._stream = stream
        self._pool = GraphMemory()
        self._feeds: dict[Hashable, Feed] = {}
        self._nearly_done = nearly_done

    def run(self, lane: Workspace, site: StepCache, step: Step, plan: Plan) -> None:
        """Takes the plan's steps, as many at once as a graph has."""
        if not plan.sizes:
            return
        refuse_rebound_parts(lane)
        feed = self._feed(lane, site, plan)
        feed.fill(plan.in_order())
        left, told = len(plan.sizes), False
        for size, count in pieces(plan.sizes):
            if not told and (left <= LAST or left == count):
                self._nearly_done.record(self._stream)
                told = True
            self._take(lane, site, step, feed, _Piece(size, count, plan.batches))
            left -= count
        refuse_rebound_parts(lane)

    def _feed(self, lane: Workspace, site: StepCache, plan: Plan) -> Feed:
        feed = self._feeds.get(site.site)
        if feed is None or feed.capacity < plan.samples:
            self._stream.synchronize()
            site.captures.clear()
            feed = self._feeds[site.site] = Feed(max(SMALLEST, 2 * plan.samples), lane.device)
        return feed

    def _take(self, lane: Workspace, site: StepCache, step: Step, feed: Feed, piece: "_Piece") -> None:
        """The next steps."""
        graph = self._graph(lane, site, step, feed, piece)
        if graph is not None:
            graph.replay()
            return
        for part in piece.split(feed.take(piece.samples)):
            step(part)

    def _graph(
        self, lane: Workspace, site: StepCache, step: Step, feed: Feed, piece: "_Piece"
    ) -> torch.cuda.CUDAGraph | None:
        """The graph of so many steps of this size; none for a single step of a new size, until that comes again."""
        if site.site in self._shared.eager:
            return None
        known: dict[Hashable, torch.cuda.CUDAGraph | None] = site.captures
        first = piece not in known and piece.count == 1 and not any(piece.times(more) in known for more in UNROLL)
        graph = known.pop(piece, None)
        if graph is None and not first:
            with self._shared.turn.aside():
                graph = self._capture(lane, site, step, feed, piece)
        known[piece] = graph  # as the one that was used last
        if len(known) > GRAPHS:
            self._stream.synchronize()
            del known[next(iter(known))]
        return graph

    def _capture(
        self, lane: Workspace, site: StepCache, step: Step, feed: Feed, piece: "_Piece"
    ) -> torch.cuda.CUDAGraph | None:
        window = feed.ahead(piece.samples)
        first = next(piece.split(window))
        with undone(lane, site):
            before = lane.generator.get_state()
            step(first)  # warm-up: statistics come into being, libraries load what they need
            draws = not torch.equal(before, lane.generator.get_state())
            if site.site not in self._shared.checked:
                try:
                    with NoPythonReads(), Watch(owned(lane, site, (window,))):
                        step(first)
                except CaptureError as error:
                    self._shared.give_up(site, error)
                    return None
                self._shared.checked.add(site.site)
            step = self._compiled(lane, site, step, first, piece.count)
            self._stream.synchronize()
            with self._shared.capturing:
                try:
                    return self._record([lane] if draws else [], step, feed, piece)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    failure = error
        self._shared.give_up(site, failure)
        return None

    def _record(self, drawing: list[Workspace], step: Step, feed: Feed, piece: "_Piece") -> torch.cuda.CUDAGraph:
        def steps() -> None:
            for part in piece.split(feed.take(piece.samples)):
                step(part)

        return capture(steps, drawing, self._pool)

    def _compiled(self, lane: Workspace, site: StepCache, step: Step, indices: Indices, count: int) -> Step:
        """The step through torch.compile, once for all lanes, if there are enough of them to be worth it."""
        if not self._shared.compile:
            return step
        key = (site.site, len(indices[0]), None if site.data is None else site.data[0].shape)

        def made() -> Compiled:
            compiled = compile_step(lane, site, step, indices)
            compiled.bind(lane, site)(indices)  # warm-up: the first call tunes kernels
            return compiled

        with self._shared.capturing:
            if key not in self._shared.compiled and count > 1:
                self._shared.compiled[key] = attempted(made)
            compiled = self._shared.compiled.get(key)
            if compiled is None:
                return step
            bound = compiled.bind(lane, site)
            bound(indices)  # warm-up: libraries load what they need in this thread
        return bound


def attempted(compile_: Callable[[], T]) -> T | None:
    """What was compiled; none, and a warning, if that failed: it does in many ways, none of which should end a run."""
    try:
        return compile_()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(f"engine.compile: a training step runs uncompiled: {error}", stacklevel=2)
        return None


def pieces(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of steps of one size, cut into as many as graphs have: (size, steps)."""
    for size, run in groupby(sizes):
        left = len(list(run))
        for count in UNROLL:
            yield from [(size, count)] * (left // count)
            left %= count


@dataclass(frozen=True)
class _Piece:
    """Some steps of one size, each of which takes so many batches."""

    size: int
    count: int
    batches: int

    @property
    def samples(self) -> int:
        return self.size * self.count * self.batches

    def times(self, count: int) -> "_Piece":
        return replace(self, count=count)

    def split(self, window: Tensor) -> Iterator[Indices]:
        """What each step takes."""
        return (part.split(self.size) for part in window.split(self.size * self.batches))


class CohortGraphs:
    """How a cohort records its steps: as CUDA graphs in this stream."""

    def __init__(self, shared: Shared, stream: torch.cuda.Stream, nearly_done: torch.cuda.Event):
        self._shared, self._stream, self._event = shared, stream, nearly_done
        self._pool = GraphMemory()

    def feed(self, capacity: int) -> Feed:
        """Room for so many samples."""
        return Feed(max(SMALLEST, capacity), self._stream.device)

    def compiled(self, function: Function, inputs: list[Tensor]) -> Function:
        """By torch's inductor, with `engine.compile`."""
        if not self._shared.compile:
            return function

        def made() -> Function:
            compiled = compile_batched(function, inputs)
            with torch.no_grad():
                compiled(*inputs)  # warm-up: the first call tunes kernels
            return compiled

        with self._shared.turn.aside(), self._shared.capturing:
            return attempted(made) or function

    def record(self, work: Callable[[], None], drawing: Sequence[Workspace]) -> Callable[[], None] | None:
        """The work as a graph; none, and a warning, if that is not possible."""
        with self._shared.turn.aside():
            work()  # warm-up: libraries load what they need
            self._stream.synchronize()
            with self._shared.capturing:
                try:
                    return capture(work, drawing, self._pool).replay
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    warnings.warn(f"engine.cohort: steps in step cannot be captured: {error}", stacklevel=2)
                    return None

    def settle(self) -> None:
        """Waits for this stream."""
        self._stream.synchronize()

    def refuse(self, site: StepCache, error: Exception) -> None:
        """These steps run eagerly, and it is said once."""
        self._shared.give_up(site, error)

    def separate(self, error: Exception) -> None:
        """Says so."""
        warnings.warn(f"engine.cohort: some training steps are taken alone, not together: {error}", stacklevel=2)

    def nearly_done(self) -> None:
        """Time to prepare what follows."""
        self._event.record(self._stream)
