"""Many clients at once on one GPU: every lane is a thread with its own stream, whose training steps are CUDA graphs."""

import gc
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.graphs import Graphs, Shared
from fedloom.errors import UserError
from fedloom.job import Job, Result, perform
from fedloom.lane import Lane, Setup

LANES, LARGE_LANES, LARGE = 16, 4, 4_000_000
"""How many lanes there are by default: a GPU is filled by many small networks, or by few of LARGE parameters."""
AHEAD = 3
"""Jobs per lane that may be given out before the result whose turn it is."""

Given = tuple[int, Job, torch.cuda.Event]


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
        if not torch.cuda.is_initialized():  # by default all streams share 8 queues to the GPU
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        super().__init__(setup, settings)
        self._todo: SimpleQueue[Given | None] = SimpleQueue()
        self._done: dict[int, Outcome] = {}
        self._changed = Condition()
        self._built = setup.build()
        shared = Shared(compile=settings.compile)
        large = sum(parameter.numel() for parameter in self._built.parameters()) >= LARGE
        self._alive = settings.workers or (LARGE_LANES if large else LANES)
        self._threads = [Thread(target=self._serve, args=(shared,), daemon=True) for _ in range(self._alive)]
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
        more = True
        try:
            while True:
                while more and given < turn + AHEAD * self._alive:
                    job = next(waiting, None)
                    more = job is not None
                    if job is not None:
                        self._todo.put((given, job, here.record_event()))
                        given += 1
                if turn == given:
                    return
                turn += 1
                result = self._wait(turn - 1).get()
                for tensor in _tensors(result):  # made in a lane's stream, used and freed in this one
                    tensor.record_stream(here)
                yield result
        finally:  # whoever stops listening must not leave jobs to the next round
            for left in range(turn, given):
                self._wait(left)

    def _wait(self, turn: int) -> Outcome:
        with self._changed:
            self._changed.wait_for(lambda: turn in self._done)
            return self._done.pop(turn)

    def _serve(self, shared: Shared) -> None:
        """A lane's life: a job in, a result out, until there is none."""
        torch.cuda.set_device(self.device)
        torch.autograd.set_multithreading_enabled(False)  # a backward pass belongs into its own lane's thread
        stream = torch.cuda.Stream()
        lane: Lane | None = None
        with torch.cuda.stream(stream):
            while (item := self._todo.get()) is not None:
                turn, job, given = item
                outcome = Outcome(job)
                try:
                    stream.wait_event(given)
                    lane = lane or self._new_lane(shared)
                    outcome.result = perform(lane, job)
                    outcome.ready = stream.record_event()  # no waiting: the next job's work follows at once
                except torch.OutOfMemoryError as error:
                    outcome.error = error if self._alive == 1 else None
                except BaseException as error:
                    outcome.error = error
                if outcome.error is None and outcome.ready is None:  # this lane gives its memory to the others
                    lane = None
                    self._retire(item, shared)
                    return
                with self._changed:
                    self._done[turn] = outcome
                    self._changed.notify_all()

    def _new_lane(self, shared: Shared) -> Lane:
        return Lane(
            self.setup,
            device=self.device,
            stepper=Graphs(shared),
            pixels=self.home.pixels,
            built=self._built,
            numbers=self.numbers,
        )

    def _retire(self, item: Given, shared: Shared) -> None:
        gc.collect()
        with shared.capturing:
            torch.cuda.empty_cache()
        with self._changed:
            self._alive -= 1
            left = self._alive
        warnings.warn(
            f"engine.workers: {left + 1} lanes do not fit into the GPU's memory; going on with {left}", stacklevel=2
        )
        self._todo.put(item)

    def close(self) -> None:
        """Ends the lanes."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        super().close()


def _tensors(result: Result) -> Iterator[Tensor]:
    for state in (result.message, result.memory, result.personal):
        if state:
            yield from (tensor for tensor in state.values() if tensor.is_cuda)
