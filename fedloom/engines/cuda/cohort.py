"""Clients in step: lanes that come to the same call of `fit` take its steps together, as one operation for all.

A method knows nothing of it: each client's code runs by itself up to a `fit`, and waits there for the others.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from fedloom.core.batches import Indices, Plan
from fedloom.core.job import ENCODED, Job, Result, handle
from fedloom.core.state import tensors_of
from fedloom.core.workspace import StepCache, Stepper, Workspace
from fedloom.engines.cuda.batching import as_rows
from fedloom.engines.cuda.together import Blocks, Device, Request, Together, pieces, samples, stacked
from fedloom.engines.recording import CaptureError, NoPythonReads, Watch, owned, refuse_rebound_parts, undone


class Strand:
    """Work that pauses wherever it is, and goes on when it is resumed; all in one thread.

    Threads that wake each other go from core to core, and find their caches cold. What torch keeps per thread is then
    everybody's in turn: whether gradients are recorded is put back at every switch, other contexts (autocast, modes)
    must not be open at a pause.
    """

    def __init__(self) -> None:
        self._work: greenlet | None = None

    def begin(self, work: Callable[[], None]) -> bool:
        """Runs this until it pauses (true) or ends (false); what it raises is raised here."""
        self._work = greenlet(work)
        return self.resume()

    def resume(self) -> bool:
        """Goes on until the next pause (true) or the end (false)."""
        assert self._work is not None
        self._work.parent = getcurrent()
        with _own_mode():
            self._work.switch()
        return self._paused

    def pause(self) -> None:
        """Called by the work itself: back to whoever resumed it, until it does so again."""
        assert self._work is not None
        assert self._work.parent is not None
        with _own_mode():
            self._work.parent.switch()

    def cancel(self) -> None:
        """If it is in a pause, it does not go on from there."""
        while self._paused:
            assert self._work is not None
            self._work.parent = getcurrent()
            try:
                with _own_mode():
                    self._work.throw(GreenletExit)
            except Exception:  # what its cleaning up raises is nobody's answer any more
                pass
        self._work = None

    @property
    def _paused(self) -> bool:
        return self._work is not None and not self._work.dead


def _own_mode() -> torch.set_grad_enabled:
    """Whether gradients are recorded belongs to the thread, and so to whoever comes back into it."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


class Seat:
    """A lane's place in a cohort: its client's work, and what it waits for."""

    fixed_memory = True

    def __init__(self, alone: Stepper):
        self.alone = alone
        """Takes steps that do not go with others'."""
        self.strand = Strand()
        self.request: Request | None = None
        self.result: Result | None = None
        self.error: Exception | None = None
        """What a step of this client raised."""

    def run(self, lane: Workspace, site: StepCache, step: Callable[[Indices], None], plan: Plan) -> None:
        """A lane's stepper: waits until the steps have been taken."""
        if not plan.sizes:
            return
        if _inside_a_context(lane):
            self.alone.run(lane, site, step, plan)
            return
        refuse_rebound_parts(lane)
        self.request = Request(lane, site, step, plan)
        self.strand.pause()
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error  # it becomes this client's result
        finally:
            del error  # whose traceback holds all that led here
        refuse_rebound_parts(lane)

    def begin(self, lane: Workspace, job: Job) -> None:
        """The job, up to the first call of `fit`."""

        def work() -> None:
            self.result = handle(lane, job)

        self.strand.begin(work)


class Cohort:
    """Lanes that do their jobs at once."""

    def __init__(
        self, many: int, new_lane: Callable[[Stepper], Workspace], new_stepper: Callable[[], Stepper], device: Device
    ):
        self._device = device
        self._seats = [Seat(new_stepper()) for _ in range(many)]
        self._blocks: Blocks = {}
        self._calls: dict[Hashable, Together | None] = {}
        self.lanes = [new_lane(seat) for seat in self._seats]
        for trees in ([lane.parts for lane in self.lanes], [lane.received for lane in self.lanes]):
            for tensors in zip(*map(tensors_of, trees), strict=True):
                self._blocks[id(tensors[0])] = tensors[0], as_rows(tensors)
        for lane in self.lanes:
            lane.moved()  # from now on parts stay where they are

    def attempt(self, jobs: Sequence[Job]) -> list[Result]:
        """All jobs' results; the longest first, so that the others fall out of step one after another."""
        seats = self._seats[: len(jobs)]
        try:
            self._spread(jobs)
            for seat, lane, job in zip(seats, self.lanes, jobs, strict=False):
                seat.begin(lane, job)
            while waiting := [(n, seat, seat.request) for n, seat in enumerate(seats) if seat.request is not None]:
                self._serve([(number, request) for number, _, request in waiting])
                for _, seat, _ in waiting:
                    seat.request = None
                    seat.strand.resume()
        except BaseException:
            for seat in seats:
                seat.request = seat.error = None
                seat.strand.cancel()
            raise
        finally:
            for lane in self.lanes:
                lane.holds = None
        results = [seat.result for seat in seats if seat.result is not None]
        assert len(results) == len(jobs)
        for seat in seats:
            seat.result = None
        return results

    @torch.no_grad()
    def _spread(self, jobs: Sequence[Job]) -> None:
        """A message that all of them get is put into all their lanes at once, if it is theirs as it is."""
        message, first, lanes = jobs[0].message, self.lanes[0], self.lanes[: len(jobs)]
        encoded = jobs[0].kind in ENCODED and first.setup.codec.down is not None
        if encoded or any(job.message is not message for job in jobs) or any(lane.moved() for lane in lanes):
            return
        values = [(tensor, message.get(name, first.initial[name])) for name, tensor in first.filled()]
        if any(value.shape != tensor.shape for tensor, value in values):  # whoever loads it says so
            return
        for tensor, value in values:
            _, block = self._blocks[id(tensor)]
            block[: len(jobs)].copy_(value)
        for lane in lanes:
            lane.holds = message

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
        """This lane's steps; what they raise is its client's, and ends its work alone."""
        seat = self._seats[number]
        if seat.error is not None:
            return
        try:
            seat.alone.run(request.lane, request.site, request.step, plan)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            seat.error = error

    def _in_step(self, together: Together, group: list[Request]) -> None:
        plans = [request.plan for request in group]
        order = pieces(plans)
        together.hold(len(group))
        able = {size for size in {piece.size for piece in order if piece.together} if together.can(size, group[0])}
        together.fill([samples(plans, piece) for piece in order if piece.together and piece.size in able])
        for position, piece in enumerate(order, start=1):
            if position == len(order):
                self._device.nearly_done()
            if piece.together and piece.size in able:
                together.take(piece, plans[0].batches)
                continue
            for number, start in zip(piece.lanes, piece.start, strict=True):
                request, end = group[number], start + piece.size * piece.count
                self._by_itself(number, request, Plan(request.plan.index[:, start:end], [piece.size] * piece.count))

    def _together(self, group: list[Request]) -> Together | None:
        """What is known of the group's call; none if its steps cannot be recorded, or raise."""
        call = group[0].call
        if call not in self._calls or ((known := self._calls[call]) is not None and known.grown):
            lane, site, step = group[0].lane, group[0].site, group[0].step
            first = next(group[0].plan.steps(lane.device))
            try:
                with undone(lane, site):
                    step(first)  # warm-up: statistics come into being
                    with NoPythonReads(), Watch(owned(lane, site, first)):
                        step(first)
            except torch.OutOfMemoryError:
                raise
            except CaptureError as error:
                self._device.refuse(site, error)
                self._calls[call] = None
            except Exception:
                return None  # alone it is raised where it belongs
            else:
                self._calls[call] = self._made(site)
        return self._calls[call]

    def _made(self, like: StepCache) -> Together:
        sites = [
            lane.caches.get(like.site) or lane.step_cache(like.site, like.parts, like.optimizers) for lane in self.lanes
        ]
        self._device.settle()
        stacked(self.lanes, sites, self._blocks)
        return Together(self._device, self.lanes, sites, self._blocks)


def _inside_a_context(lane: Workspace) -> bool:
    """Whether something of torch's is open that belongs to the thread, and would be the other clients' as well."""
    return (
        torch.is_autocast_enabled(lane.device.type)
        or torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )
