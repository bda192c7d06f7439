"""Clients in step: lanes that come to the same call of `fit` take its steps together, as one operation for all.

A step that was traced on one lane is a function of its tensors; torch.func.vmap makes it a function of all lanes'. A
method knows nothing of it: each client's code runs by itself up to a `fit`, and waits there for the others.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.batching import as_rows, batched
from fedloom.engines.lockstep import Piece, pieces, samples
from fedloom.engines.recording import CaptureError, NoPythonReads, Watch, owned, undone
from fedloom.engines.strand import Strand
from fedloom.engines.tracing import Draw, trace, unique
from fedloom.job import Job, Result, attempt
from fedloom.lane import Lane, Site, Stepper
from fedloom.parts import tensors_of
from fedloom.plan import Indices, Plan

UNROLL = (8, 4, 2, 1)
"""Steps that are recorded as one."""

Work = Callable[[], None]
Function = Callable[..., Any]
Blocks = dict[int, tuple[Tensor, Tensor]]
"""By the first lane's tensor: that tensor, and the block of which all lanes' are rows."""


@dataclass(frozen=True)
class Request:
    """A lane at a call of `fit`."""

    lane: Lane
    site: Site
    step: Callable[[Indices], None]
    plan: Plan

    @property
    def call(self) -> Hashable:
        """What requests that can be served together have in common."""
        data = None if self.site.data is None else self.site.data[0].shape
        return self.site.where, self.plan.batches, data


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

    def record(self, work: Work, lanes: Sequence[Lane]) -> Work | None:
        """The work to be done again and again; none if it cannot be recorded."""
        ...

    def refuse(self, site: Site, error: Exception) -> None:
        """Says why steps of this call are not taken together."""
        ...

    def nearly_done(self) -> None:
        """Only the last piece is left to do."""
        ...


class Seat:
    """A lane's place in a cohort: its client's work, and what it waits for."""

    fixed_memory = True

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]):
        self.strand = Strand(setting)
        self.request: Request | None = None
        self.result: Result | None = None

    def run(self, lane: Lane, site: Site, step: Callable[[Indices], None], plan: Plan) -> None:
        """A lane's stepper: waits until the steps have been taken."""
        if plan.sizes:
            self.request = Request(lane, site, step, plan)
            self.strand.pause()

    def begin(self, lane: Lane, job: Job) -> None:
        """The job, up to the first call of `fit`."""

        def work() -> None:
            self.result = attempt(lane, job)

        self.strand.begin(work)


class Cohort:
    """Lanes that do their jobs at once."""

    def __init__(
        self,
        many: int,
        new_lane: Callable[[Stepper], Lane],
        new_stepper: Callable[[], Stepper],
        device: Device,
        setting: Callable[[], AbstractContextManager[object]],
    ):
        self._device = device
        self._seats = [Seat(setting) for _ in range(many)]
        self._alone = [new_stepper() for _ in range(many)]
        self.lanes = [new_lane(seat) for seat in self._seats]
        self._blocks: Blocks = {}
        self._calls: dict[Hashable, Together | None] = {}
        for get in (lambda lane: lane.parts, lambda lane: lane.received):
            for tensors in zip(*(tensors_of(get(lane)) for lane in self.lanes), strict=True):
                self._blocks[id(tensors[0])] = tensors[0], as_rows(tensors)

    def attempt(self, jobs: Sequence[Job]) -> list[Result]:
        """All jobs' results; the longest first, so that the others fall out of step one after another."""
        seats = self._seats[: len(jobs)]
        try:
            for seat, lane, job in zip(seats, self.lanes, jobs, strict=False):
                seat.begin(lane, job)
            while waiting := [seat for seat in seats if seat.request is not None]:
                self._serve([(number, seat.request) for number, seat in enumerate(seats) if seat.request is not None])
                for seat in waiting:
                    seat.request = None
                    seat.strand.resume()
        except BaseException:
            for seat in seats:
                seat.request = None
                seat.strand.cancel()
            raise
        results = [seat.result for seat in seats if seat.result is not None]
        assert len(results) == len(jobs)
        for seat in seats:
            seat.result = None
        return results

    def close(self) -> None:
        """Ends the lanes' threads."""
        for seat in self._seats:
            seat.strand.close()

    def _serve(self, requests: list[tuple[int, Request]]) -> None:
        """Those of the first lanes that come to the same call, in step; others one after another."""
        first = requests[0][1]
        alike = takewhile(lambda pair: pair[1][0] == pair[0] and pair[1][1].call == first.call, enumerate(requests))
        group = [request for _, (_, request) in alike]
        together = self._together(group) if len(group) > 1 else None
        if together is not None:
            self._in_step(together, group)
        for number, request in requests[len(group) if together is not None else 0 :]:
            self._by_itself(number, request, request.plan)

    def _by_itself(self, number: int, request: Request, plan: Plan) -> None:
        self._alone[number].run(request.lane, request.site, request.step, plan)

    def _in_step(self, together: "Together", group: list[Request]) -> None:
        plans = [request.plan for request in group]
        order = pieces(plans)
        together.fill([samples(plans, piece) for piece in order if piece.together])
        for position, piece in enumerate(order, start=1):
            if position == len(order):
                self._device.nearly_done()
            if piece.together:
                together.take(piece, group[0])
            else:
                request, (number,), (start,) = group[piece.lanes[0]], piece.lanes, piece.start
                end = start + piece.size * piece.count
                self._by_itself(number, request, Plan(request.plan.index[:, start:end], [piece.size] * piece.count))

    def _together(self, group: list[Request]) -> "Together | None":
        call = group[0].call
        if call not in self._calls:
            self._calls[call] = self._prepared(group)
        known = self._calls[call]
        if known is not None and known.moved():
            known = self._calls[call] = self._prepared(group)
        return known

    def _prepared(self, group: list[Request]) -> "Together | None":
        """All lanes' memory of a call of `fit` as blocks; none where its steps are not fit for it."""
        lane, site, step, plan = (getattr(group[0], name) for name in ("lane", "site", "step", "plan"))
        first = next(plan.steps(lane.device))
        try:
            with undone(lane, site):
                step(first)  # warm-up: statistics come into being
                with NoPythonReads(), Watch(owned(lane, site, first)):
                    step(first)
        except CaptureError as error:
            self._device.refuse(site, error)
            return None
        sites = [self._site(other, site) for other in self.lanes]
        for own in zip(*(unique(other, at) for other, at in zip(self.lanes, sites, strict=True)), strict=True):
            if id(own[0]) not in self._blocks and own[0].data_ptr() != own[1].data_ptr():
                self._blocks[id(own[0])] = own[0], as_rows(own)
        for at in sites:
            at.captures.clear()
        return Together(self._device, self.lanes, sites, self._blocks)

    def _site(self, lane: Lane, like: Site) -> Site:
        """This lane's memory of the same call, made if it has not come there yet."""
        site = lane.sites.get(like.where) or lane.site(like.where, like.optimizers)
        for name, total in like.sums.items():
            site.sums.setdefault(name, torch.zeros_like(total))
        if like.data is not None and (site.data is None or site.data[0].shape != like.data[0].shape):
            site.data = torch.zeros_like(like.data[0]), torch.zeros_like(like.data[1])
        return site


class Together:
    """A call of `fit` that all lanes of a cohort come to: its steps as functions of blocks of memory."""

    def __init__(self, device: Device, lanes: list[Lane], sites: list[Site], blocks: Blocks):
        self._device, self._lanes, self._sites = device, lanes, sites
        own = unique(lanes[0], sites[0])
        self._shared = [id(tensor) not in blocks for tensor in own]
        self._inputs = [(blocks[id(tensor)][1] if id(tensor) in blocks else tensor).detach() for tensor in own]
        self._data = [None if site.data is None else site.data[0].data_ptr() for site in sites]
        self._traced: dict[int, tuple[Function, list[Draw]]] = {}
        self._compiled: dict[int, Function] = {}
        """Steps of all lanes, by size."""
        self._recorded: dict[Hashable, Work | None] = {}
        self._feed = device.feed(0)

    def moved(self) -> bool:
        """Whether somebody's features have got other memory."""
        return self._data != [None if site.data is None else site.data[0].data_ptr() for site in self._sites]

    def fill(self, pieces: list[np.ndarray]) -> None:
        """The samples of all pieces that follow."""
        values = np.concatenate([piece.ravel() for piece in pieces]) if pieces else np.empty(0, np.int64)
        if self._feed.capacity < len(values):
            self._recorded.clear()
            self._feed = self._device.feed(2 * len(values))
        self._feed.fill(values)

    def take(self, piece: Piece, request: Request) -> None:
        """The next piece's steps; `request` is the first lane's."""
        if piece.size not in self._traced:
            indices = tuple(row[: piece.size].to(request.lane.device) for row in request.plan.index)
            graph, draws, inputs = trace(request.lane, request.site, request.step, indices)
            shared = self._shared + [False] * (len(inputs) - len(self._shared))
            self._traced[piece.size] = batched(graph, shared), draws
        left = piece.count
        for count in UNROLL:
            while left >= count:
                self._do(len(piece.lanes), piece.size, count, request)
                left -= count

    def _do(self, lanes: int, size: int, count: int, request: Request) -> None:
        """So many steps, recorded at once unless it is a single one of a new kind."""
        key = (lanes, size, count)

        def work() -> None:
            self._steps(lanes, size, count, request.plan.batches)

        if key not in self._recorded and count == 1:
            self._recorded[key] = None
            work()
            return
        if self._recorded.get(key) is None:
            with ExitStack() as undo, self._feed.undone():
                for lane, site in zip(self._lanes, self._sites, strict=True):
                    undo.enter_context(undone(lane, site))
                if lanes == len(self._lanes) and count > 1 and size not in self._compiled:
                    window = self._feed.take(lanes * request.plan.batches * size).view(lanes, -1, size)
                    inputs = self._arguments(lanes, size, window)
                    self._compiled[size] = self._device.compiled(self._traced[size][0], inputs)
                self._recorded[key] = self._device.record(work, self._lanes[:lanes])
        (self._recorded[key] or work)()

    def _steps(self, lanes: int, size: int, count: int, batches: int) -> None:
        function = self._traced[size][0]
        if lanes == len(self._lanes):
            function = self._compiled.get(size, function)
        window = self._feed.take(count * lanes * batches * size).view(count, lanes, batches, size)
        with torch.no_grad():
            for step in window:
                function(*self._arguments(lanes, size, step))

    def _arguments(self, lanes: int, size: int, step: Tensor) -> list[Tensor]:
        """Blocks of memory, the samples that a step takes, and what is drawn for it."""
        rows = [tensor if common else tensor[:lanes] for tensor, common in zip(self._inputs, self._shared, strict=True)]
        draws = self._traced[size][1]
        drawn = [torch.stack([draw(lane.generator) for lane in self._lanes[:lanes]]) for draw in draws]
        return [*rows, *step.unbind(1), *drawn]
