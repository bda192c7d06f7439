"""A call of `fit` to which many lanes come: its steps, traced on one of them, as functions of all lanes' memory."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Indices, Plan
from fedloom.core.workspace import StepCache, Workspace
from fedloom.engines.cuda.batching import as_rows, batched
from fedloom.engines.cuda.tracing import Draw, trace, unique
from fedloom.engines.recording import CaptureError, undone


@dataclass(frozen=True)
class Piece:
    """Some steps of one size: of the first so many lanes in step, or of one lane alone."""

    lanes: range
    size: int
    count: int
    start: tuple[int, ...]
    """How many samples of its plan each of the lanes has taken before."""

    @property
    def together(self) -> bool:
        """Whether lanes go in step."""
        return len(self.lanes) > 1


def pieces(plans: Sequence[Plan]) -> list[Piece]:
    """Everybody's steps, each lane's in its own order.

    As long as all lanes that have steps left come to the same size they go in step. Before that, whoever comes to
    another (a remainder) takes it alone. Lanes are in step from the first on: a lane with more steps than one before it
    takes the last of them alone.
    """
    left = [[(size, len(list(run))) for size, run in groupby(plan.sizes)][::-1] for plan in plans]
    taken = [0] * len(plans)
    found: list[Piece] = []

    def take(lanes: range, count: int) -> None:
        size = left[lanes[0]][-1][0]
        found.append(Piece(lanes, size, count, tuple(taken[lane] for lane in lanes)))
        for lane in lanes:
            taken[lane] += size * count
            rest = left[lane].pop()[1] - count
            if rest:
                left[lane].append((size, rest))

    usual = Counter(size for plan in plans for size in plan.sizes).most_common(1)[0][0] if any(left) else 0
    while any(left):
        active = range(next((lane for lane, runs in enumerate(left) if not runs), len(left)))
        coming = {left[lane][-1][0] for lane in active}
        if len(active) > 1 and len(coming) == 1:
            take(active, min(left[lane][-1][1] for lane in active))
            continue
        alone = [lane for lane in active if left[lane][-1][0] != usual] if len(active) > 1 else range(len(left))
        for lane in [lane for lane in alone if left[lane]]:
            take(range(lane, lane + 1), left[lane][-1][1])
    return found


def samples(plans: Sequence[Plan], piece: Piece) -> np.ndarray:
    """int64 [count, lanes, batches, size]: what every step of a piece takes."""
    length = piece.size * piece.count
    rows = [plans[lane].index.numpy()[:, a : a + length] for lane, a in zip(piece.lanes, piece.start, strict=True)]
    return np.stack(rows).reshape(len(rows), -1, piece.count, piece.size).transpose(2, 0, 1, 3)


UNROLL = (8, 4, 2, 1)
"""Steps that are recorded as one."""
KEPT = 64
"""Recordings of a call; the one that was not used for the longest time goes first."""

Work = Callable[[], None]
Function = Callable[..., Any]
Blocks = dict[int, tuple[Tensor, Tensor]]
"""By the id of the first lane's tensor: that tensor, and the block of which all lanes' are rows."""


@dataclass(frozen=True)
class Request:
    """A lane at a call of `fit`."""

    lane: Workspace
    site: StepCache
    step: Callable[[Indices], None]
    plan: Plan

    @property
    def call(self) -> Hashable:
        """What requests that can be served together have in common."""
        data = None if self.site.data is None else self.site.data[0].shape[1:]
        return self.site.site, self.plan.batches, data


class Feed(Protocol):
    """Samples, from which every step takes the next ones."""

    capacity: int

    def fill(self, values: np.ndarray) -> None:
        """New ones, from the first on."""
        ...

    def take(self, count: int) -> Tensor:
        """The next ones."""
        ...

    def undone(self) -> AbstractContextManager[None]:
        """Whatever is taken inside is there to be taken again."""
        ...


class Device(Protocol):
    """How work is recorded there."""

    def feed(self, capacity: int) -> Feed:
        """Room for so many samples."""
        ...

    def compiled(self, function: Function, inputs: list[Tensor]) -> Function:
        """The same function, made faster if that is asked for. It is called on these inputs, which change."""
        ...

    def record(self, work: Work, drawing: Sequence[Workspace]) -> Work | None:
        """The work, in which these lanes draw, to be done again and again; none if it cannot be recorded."""
        ...

    def settle(self) -> None:
        """Waits for what was given: recordings are about to go."""
        ...

    def refuse(self, site: StepCache, error: Exception) -> None:
        """Steps of this call cannot be recorded at all; says why."""
        ...

    def separate(self, error: Exception) -> None:
        """Steps cannot be taken together, only alone; says why."""
        ...

    def nearly_done(self) -> None:
        """Only the last piece is left to do."""
        ...


def stacked(lanes: list[Workspace], sites: list[StepCache], blocks: Blocks) -> None:
    """Makes rows of blocks of all that steps touch, but of features, which come with every call."""
    names = dict.fromkeys(name for site in sites for name in site.sums)
    for site in sites:  # the same statistics, in one order
        sums = {name: site.sums.get(name, torch.zeros_like(site.lr)) for name in names}
        site.sums.clear()
        site.sums.update(sums)
    for own in zip(*(_fixed(lane, site) for lane, site in zip(lanes, sites, strict=True)), strict=True):
        if id(own[0]) not in blocks and own[0].data_ptr() != own[1].data_ptr():
            blocks[id(own[0])] = own[0], as_rows(own)
    for site in sites:
        site.captures.clear()


def _fixed(lane: Workspace, site: StepCache) -> list[Tensor]:
    features = {id(tensor) for tensor in site.data or ()}
    return [tensor for tensor in unique(lane, site) if id(tensor) not in features]


class Together:
    """What is known of a call: functions of blocks by size, and recordings of them."""

    def __init__(self, device: Device, lanes: list[Workspace], sites: list[StepCache], blocks: Blocks):
        self._device, self._lanes, self._sites = device, lanes, sites
        own = _fixed(lanes[0], sites[0])
        self._shared = [id(tensor) not in blocks for tensor in own] + [False] * len(sites[0].data or ())
        self._own = [(blocks[id(tensor)][1] if id(tensor) in blocks else tensor).detach() for tensor in own]
        self._features: list[Tensor] = []
        self._sums = len(sites[0].sums)
        self._generators = [lane.generator for lane in lanes]
        self._traced: dict[int, tuple[Function, list[Draw]] | None] = {}
        self._compiled: dict[int, Function] = {}
        """Steps of all lanes, by size."""
        self._recorded: dict[Hashable, Work] = {}
        self._once: set[Hashable] = set()
        """Single steps that came once: they are recorded when they come again."""
        self._feed = device.feed(0)

    @property
    def grown(self) -> bool:
        """Whether there are statistics that were not there at first."""
        return len(self._sites[0].sums) != self._sums

    def hold(self, lanes: int) -> None:
        """Takes the first so many lanes' features."""
        given = [site.data for site in self._sites[:lanes] if site.data is not None]
        if not given:
            return
        capacity = max(len(data[0]) for data in given)
        if not self._features or self._features[0].shape[1] < capacity:
            self._forget()
            self._features = [t.new_zeros(len(self._lanes), capacity, *t.shape[1:]) for t in given[0]]
        for row, data in enumerate(given):
            for block, values in zip(self._features, data, strict=True):
                block[row, : len(values)].copy_(values)

    def can(self, size: int, request: Request) -> bool:
        """Whether lanes can take steps of this size at once: traced on the first lane's request, tried on two."""
        if size not in self._traced:
            try:
                with ExitStack() as undo:
                    self._undone(undo)
                    self._trace(size, request)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # vmap has its limits: what cannot be done together is done alone
                self._traced[size] = None
                self._device.separate(error)
        return self._traced[size] is not None

    def _trace(self, size: int, request: Request) -> None:
        indices = tuple(row[:size].to(request.lane.device) for row in request.plan.index)
        graph, draws, inputs = trace(request.lane, request.site, request.step, indices)
        if self.grown:
            raise CaptureError("a step notes what steps of other sizes do not")
        function = batched(graph, self._shared + [False] * (len(inputs) - len(self._shared)))
        self._traced[size] = function, draws
        with torch.no_grad():
            function(*self._arguments(2, size, torch.stack([torch.stack(indices)] * 2)))

    def fill(self, pieces: list[np.ndarray]) -> None:
        """The samples of all pieces that follow."""
        values = np.concatenate([piece.ravel() for piece in pieces]) if pieces else np.empty(0, np.int64)
        if self._feed.capacity < len(values):
            self._forget()
            self._feed = self._device.feed(2 * len(values))
        self._feed.fill(values)

    def take(self, piece: Piece, batches: int) -> None:
        """The next piece's steps."""
        left = piece.count
        for count in UNROLL:
            while left >= count:
                self._do(len(piece.lanes), piece.size, count, batches)
                left -= count

    def _do(self, lanes: int, size: int, count: int, batches: int) -> None:
        """So many steps, recorded at once unless it is a single one of a new kind."""
        self._forget_old_generators()
        key = (lanes, size, count)

        def work() -> None:
            self._steps(lanes, size, count, batches)

        recorded = self._recorded.pop(key, None)
        if recorded is None and (count > 1 or key in self._once):
            recorded = self._record(lanes, size, count, batches, work)
        if recorded is None:
            self._once.add(key)
            work()
            return
        self._recorded[key] = recorded  # as the one that was used last
        if len(self._recorded) > KEPT:
            self._device.settle()
            del self._recorded[next(iter(self._recorded))]
        recorded()

    def _record(self, lanes: int, size: int, count: int, batches: int, work: Work) -> Work:
        with ExitStack() as undo, self._feed.undone():
            self._undone(undo)
            if lanes == len(self._lanes) and count > 1 and size not in self._compiled:
                with self._feed.undone():
                    window = self._feed.take(lanes * batches * size).view(lanes, batches, size)
                function, _ = self._known(size)
                self._compiled[size] = self._device.compiled(function, self._arguments(lanes, size, window))
            _, draws = self._known(size)
            recorded = self._device.record(work, self._lanes[:lanes] if draws else [])
        self._forget_old_generators()
        return recorded or work

    def _steps(self, lanes: int, size: int, count: int, batches: int) -> None:
        function, _ = self._known(size)
        if lanes == len(self._lanes):
            function = self._compiled.get(size, function)
        window = self._feed.take(count * lanes * batches * size).view(count, lanes, batches, size)
        with torch.no_grad():
            for step in window:
                function(*self._arguments(lanes, size, step))

    def _arguments(self, lanes: int, size: int, step: Tensor) -> list[Tensor]:
        """Blocks of memory, the samples that a step takes, and what is drawn for it."""
        inputs = zip([*self._own, *self._features], self._shared, strict=True)
        rows = [tensor if common else tensor[:lanes] for tensor, common in inputs]
        _, draws = self._known(size)
        drawn = [torch.stack([draw(lane.generator) for lane in self._lanes[:lanes]]) for draw in draws]
        return [*rows, *step.unbind(1), *drawn]

    def _known(self, size: int) -> tuple[Function, list[Draw]]:
        known = self._traced[size]
        assert known is not None
        return known

    def _undone(self, undo: ExitStack) -> None:
        for lane, site in zip(self._lanes, self._sites, strict=True):
            undo.enter_context(undone(lane, site))

    def _forget_old_generators(self) -> None:
        """A capture that breaks off renews them: what was recorded before draws from those that were."""
        generators = [lane.generator for lane in self._lanes]
        if generators != self._generators:
            self._forget()
            self._generators = generators

    def _forget(self) -> None:
        self._device.settle()
        self._recorded.clear()
