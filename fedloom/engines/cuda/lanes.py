"""Many clients at once on one GPU: every lane is a thread with its own stream, whose training steps are CUDA graphs."""

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Condition, Lock, Thread
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result, handle
from fedloom.core.message import Message, magnitudes
from fedloom.core.workspace import Setup, Stepper, Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.cuda import queues
from fedloom.engines.cuda.cohort import Cohort
from fedloom.engines.cuda.graphs import CohortGraphs, Graphs, Shared


class Notes:
    """A row for each of so many turns: the largest magnitude in every tensor that is sent, then the training loss."""

    def __init__(self, turns: int, sent: Message):
        self._names = list(sent.numbers)
        dtype = magnitudes(sent.numbers.values())[0].dtype if self._names else torch.float32
        pinned = torch.cuda.is_available()  # not in tests
        self._rows = torch.zeros(turns, len(self._names) + 1, dtype=dtype, pin_memory=pinned)
        self._values: np.ndarray = self._rows.numpy()

    def write(self, turns: Sequence[int], results: Sequence[Result]) -> None:
        """In the lane's stream, without waiting; what is told of several results in as few operations as of one."""
        sent = [result.message[name] for result in results if result.message is not None for name in self._names]
        told = iter(magnitudes(sent) if sent else [])
        losses = [result.loss for result in results if isinstance(result.loss, Tensor)]
        if not sent and not losses:
            return
        nothing = (sent or losses)[0].new_zeros((), dtype=self._rows.dtype)
        found: list[Tensor] = []
        for result in results:
            found += [nothing if result.message is None else next(told) for _ in self._names]
            found.append(result.loss.to(self._rows.dtype) if isinstance(result.loss, Tensor) else nothing)
        rows = torch.stack(found).view(len(results), -1)
        places = [turn % len(self._rows) for turn in turns]
        ends = [n for n in range(1, len(places) + 1) if n == len(places) or places[n] != places[n - 1] + 1]
        for start, end in zip([0, *ends], ends, strict=False):
            self._rows[places[start] : places[end - 1] + 1].copy_(rows[start:end], non_blocking=True)

    def read(self, turn: int, result: Result) -> None:
        """When the result is ready: its loss becomes a number, and its message knows whether it is finite."""
        told = self._values[turn % len(self._rows)]
        if isinstance(result.loss, Tensor):
            result.loss = float(told[-1])
        if result.message is not None and self._names:
            result.message.finite = bool(np.isfinite(told[:-1]).all())


LANES, LARGE_LANES, LARGE = 8, 4, 4_000_000
"""How many lanes there are by default: a GPU is filled by many small networks, or by few of LARGE parameters."""
COHORTS = 2
"""How many cohorts there are by default: while one computes, the other prepares."""
AHEAD = 3
"""Jobs per lane that may be given out before the result whose turn it is."""

Given = tuple[int, Job, torch.cuda.Event]
Attempt = Callable[[list[Job]], list[Result]]


@dataclass
class Outcome:
    """A job's result, or what went wrong. Its tensors are there when the event has happened.

    The job's own tensors, which a lane may still be reading, are held until then.
    """

    job: Job
    result: Result | None = None
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None

    def get(self) -> Result:
        """The result, when it is there."""
        if self.error is not None:
            raise self.error
        assert self.ready is not None
        assert self.result is not None
        self.ready.synchronize()
        return self.result


class Lanes(Engine):
    """Clients side by side on one GPU; the same numbers as inline there (bit for bit with `deterministic`)."""

    name: ClassVar[str] = "lanes"
    gpu: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        queues.ask()
        super().__init__(setup, settings)
        self._todo: deque[Given] = deque()
        self._done: dict[int, Outcome] = {}
        self._lock = Lock()
        self._news = Condition(self._lock)  # for who waits for the result of this turn
        self._awaited = -1
        self._closed = False
        self._built = setup.build()
        shared = Shared(compile=settings.compile)
        self._turn = shared.turn
        self._each = settings.cohort or 1
        large = sum(parameter.numel() for parameter in self._built.parameters()) >= LARGE
        usual = COHORTS if settings.cohort else LARGE_LANES if large else LANES
        self._alive = list(range(settings.workers or usual))
        self._wanted = len(self._alive)
        self._spent: deque[tuple[Message, torch.cuda.Event]] = deque()
        """Lanes' messages, until they have been copied."""
        self._notes = Notes(
            AHEAD * len(self._alive) * self._each + 1,
            Message(self.server_workspace.sent if setup.codec.up is None else {}),
        )  # what is encoded is looked at when it is decoded
        self._calls = {number: Condition(self._lock) for number in self._alive}  # one lane is woken at a time
        self._idle: set[int] = set()
        self._threads = [Thread(target=self._serve, args=(number, shared), daemon=True) for number in self._alive]
        for thread in self._threads:
            thread.start()

    def _device(self) -> torch.device:
        if self.settings.device == "cpu" or not torch.cuda.is_available():
            why = "engine.device is 'cpu'" if self.settings.device == "cpu" else "torch sees none"
            raise UserError(f"engine.name = 'lanes' needs an NVIDIA GPU, and {why}; use engine.name = 'processes'")
        return torch.device("cuda", torch.cuda.current_device())

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Idle lanes take the next job; results wait until their turn comes, a bounded number of them."""
        here = torch.cuda.current_stream()
        waiting = iter(jobs)
        given = turn = 0
        event, message = None, None
        try:
            while True:
                new = list(islice(waiting, max(0, turn + AHEAD * len(self._alive) * self._each - given)))
                if given == 0 and self._each == 1:
                    self._wanted = useful_lanes([self._cost(job) for job in new])
                with self._lock:
                    for i, job in enumerate(new):
                        if event is None or job.memory or job.message is not message:  # made since, in this stream
                            event, message = here.record_event(), job.message
                        self._todo.append((given + i, job, event))
                    self._call()
                given += len(new)
                if turn == given:
                    return
                turn += 1
                result = self._wait(turn - 1).get()
                self._notes.read(turn - 1, result)
                with self._turn.of("results"):
                    if (made := result.message) is not None:  # a lane uses its memory again soon
                        result.message = made.copy()
                        self._spent.append((made, here.record_event()))
                    while self._spent and self._spent[0][1].query():
                        self._spent.popleft()
                    yield result
        finally:  # whoever stops listening must not leave jobs to the next round
            for left in range(turn, given):
                self._wait(left)

    def _cost(self, job: Job) -> int:
        return len(self.setup.task.samples(job.client)) if job.kind == "update" else 1

    def _wait(self, turn: int) -> Outcome:
        with self._lock:
            self._awaited = turn
            self._news.wait_for(lambda: turn in self._done)
            return self._done.pop(turn)

    def _call(self) -> None:
        """Wakes as many idle lanes as there are jobs; under the lock."""
        able = [number for number in self._alive[: self._wanted] if number in self._idle]
        for number in able[: -(-len(self._todo) // self._each)]:
            self._idle.remove(number)
            self._calls[number].notify()

    def _next(self, number: int) -> list[Given]:
        """The next jobs for this lane, all of one kind; none at the end."""
        with self._lock:
            while not self._closed and not (self._todo and number in self._alive[: self._wanted]):
                if number not in self._alive:
                    return []
                self._idle.add(number)
                self._calls[number].wait()
            if self._closed:
                return []
            kind = self._todo[0][1].kind
            alike = takewhile(lambda given: given[1].kind == kind, islice(self._todo, self._each))
            return [self._todo.popleft() for _ in list(alike)]

    def _serve(self, number: int, shared: Shared) -> None:
        """A lane's life, or a cohort's: jobs in, results out, until there are none."""
        stream = torch.cuda.Stream(self.device)
        nearly_done = torch.cuda.Event(blocking=True)
        torch.cuda.set_device(self.device)
        torch.autograd.set_multithreading_enabled(False)  # a backward pass belongs into its own lane's thread
        with torch.cuda.stream(stream):
            attempts: Attempt | None = None
            while items := self._next(number):
                jobs = [job for _, job, _ in items]
                outcomes = [Outcome(job) for job in jobs]
                failed: BaseException | None = None
                results: list[Result] | None = None
                try:
                    for given in {id(event): event for *_, event in items}.values():
                        stream.wait_event(given)
                    attempts = attempts or self._worker(shared, stream, nearly_done)
                    with self._turn.of(jobs[0].kind, len(jobs)):
                        results = attempts(jobs)
                        ready = torch.cuda.Event(blocking=True)
                        self._notes.write([turn for turn, *_ in items], results)
                        for outcome, result in zip(outcomes, results, strict=True):
                            outcome.result, outcome.ready = result, ready
                        ready.record(stream)
                except BaseException as error:
                    failed = error
                if failed is not None:
                    outcomes = [Outcome(job, error=failed) for job in jobs]
                if isinstance(failed, torch.OutOfMemoryError):  # this lane gives its memory to the others
                    failed.with_traceback(None).__cause__ = failed.__context__ = None  # whose frames hold it
                    attempts = results = None
                    if self._made_room(number, items, shared):
                        continue
                with self._lock:
                    for (turn, *_), outcome in zip(items, outcomes, strict=True):
                        self._done[turn] = outcome
                    if self._awaited in self._done:
                        self._news.notify()
                nearly_done.synchronize()  # whoever took two jobs at once would keep one from an idle lane

    def _worker(self, shared: Shared, stream: torch.cuda.Stream, nearly_done: torch.cuda.Event) -> Attempt:
        """A new lane, or a cohort of them."""

        def stepper() -> Graphs:
            return Graphs(shared, stream, nearly_done)

        if self._each == 1:
            lane = self._new_lane(stepper())
            return lambda jobs: [handle(lane, job) for job in jobs]
        device = CohortGraphs(shared, stream, nearly_done)
        return Cohort(self._each, self._new_lane, stepper, device).attempt

    def _new_lane(self, stepper: Stepper) -> Workspace:
        return Workspace(
            self.setup,
            device=self.device,
            stepper=stepper,
            pixels=self.server_workspace.pixels,
            built=self._built,
            precision=self.precision,
        )

    def _made_room(self, number: int, items: list[Given], shared: Shared) -> bool:
        """Goes on with one lane less, or with smaller cohorts; false when there is nothing left to do without."""
        gc.collect()
        with shared.capturing:
            torch.cuda.empty_cache()
        with self._lock:
            many, each = len(self._alive), self._each
            if many > 1:
                self._alive.remove(number)
                told = f"engine.workers: {many} lanes do not fit into the GPU's memory; going on with {many - 1}"
            elif each > 1:
                self._each = each // 2
                told = f"engine.cohort: {each} clients do not fit into the GPU's memory; going on with {each // 2}"
            else:
                return False
            self._todo.extendleft(reversed(items))
            self._call()
        warnings.warn(told, stacklevel=2)
        return True

    def close(self) -> None:
        """Ends the lanes."""
        self._turn.end()
        with self._lock:
            self._closed = True
            for call in self._calls.values():
                call.notify()
        for thread in self._threads:
            thread.join()
        super().close()


def useful_lanes(costs: list[int]) -> int:
    """How many lanes a round can use: more of them would only slow the longest job down, which all wait for."""
    return max(1, sum(costs) // max(1, *costs)) if costs else 1
