"""The engine `lanes`: many clients at once on one GPU. Each lane is a CUDA stream that runs one or several clients.

One thread launches all GPU work and waits only for results, so that the lanes are always busy.
"""

import gc
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.flat_state import FlatState
from fedloom.core.job import Job, Result
from fedloom.core.setup import Setup
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.cuda import connections
from fedloom.engines.cuda.graphs import Graphs
from fedloom.engines.cuda.tuning import Tuning, faster, free_memory, tune
from fedloom.engines.ordered import ordered
from fedloom.engines.recorded.cohort import Cohort
from fedloom.engines.recorded.lane import Lane, Shared

AHEAD = 3
"""Batches of jobs per lane that are launched ahead of the awaited result."""
LONGEST = 4
"""Maximum number of jobs in a batch, as a multiple of the clients that a lane runs at a time."""


class Batch:
    """Jobs that a lane runs at once, and their results."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        """Kept until the results are read, because the GPU may still read their tensors."""
        self.results: list[Result] | None = None
        self._numbers: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def launched(self, lane: Lane, results: list[Result]) -> None:
        """Copy losses and largest magnitudes of the results to the host asynchronously, in the lane's stream."""
        losses = [r.loss for r in results if isinstance(r.loss, Tensor)]
        largest = lane.largest(results)
        columns = [*([torch.stack(losses).float()] if losses else []), *([] if largest is None else [largest.float()])]
        if columns:
            self._numbers = torch.cat(columns).to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event(blocking=True)
        self._ready.record()
        self.results = results

    def read(self) -> list[Result]:
        """Wait for the GPU and return the completed results."""
        assert self.results is not None
        if self._ready is not None:
            self._ready.synchronize()
            numbers: list[float] = [] if self._numbers is None else self._numbers.tolist()
            values = iter(numbers)
            for result in self.results:
                if isinstance(result.loss, Tensor):
                    result.loss = next(values)
            sent = [result.message for result in self.results if result.message is not None]
            for message, largest in zip(sent, values, strict=False):
                message.finite = bool(np.isfinite(largest))
            for result in self.results:
                result.read()
            self._ready, self.jobs = None, []
        return self.results


@dataclass
class Handle:
    """A job's position in a batch."""

    engine: "Lanes"
    batch: Batch
    place: int

    def result(self) -> Result:
        """Wait for the GPU and return the result."""
        if self.batch.results is None:
            self.engine.launch(self.batch)
        return self.batch.read()[self.place]


class Lanes(Engine):
    """Clients in parallel on one GPU; equal to inline on the GPU (bit-identical with `deterministic`)."""

    name: ClassVar[str] = "lanes"
    gpu: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True
    mixes_networks: ClassVar[bool] = False

    def __init__(self, setup: Setup, settings: EngineSettings):
        connections.request()
        super().__init__(setup, settings)
        self._built = setup.build()
        parameters = sum(parameter.numel() for parameter in self._built.parameters())
        if not self.server_workspace.features:  # a frozen network that runs in every step is as large as a trained one
            parameters += sum(
                t.numel() for n, t in self.server_workspace.tensors.items() if n not in self.server_workspace.flat
            )
        self.tuning: Tuning = tune(setup, settings, parameters, free_memory(self.device))
        self._shared = Shared(compile=settings.compile)
        self._lanes: list[_Stream] = [_Stream() for _ in range(self.tuning.lanes)]
        self._useful = len(self._lanes)
        self._clients = self.tuning.clients
        self._jobs = self._clients
        self._undo.callback(torch.autograd.set_multithreading_enabled, torch.autograd.is_multithreading_enabled())
        torch.autograd.set_multithreading_enabled(False)  # backward passes must run in the capturing thread

    def _device(self) -> torch.device:
        if self.settings.device == "cpu" or not torch.cuda.is_available():
            why = "engine.device is 'cpu'" if self.settings.device == "cpu" else "torch sees none"
            raise UserError(f"engine.name = 'lanes' needs an NVIDIA GPU, but {why}; use engine.name = 'processes'")
        return torch.device("cuda", torch.cuda.current_device())

    def choice(self) -> dict[str, int]:
        """Return the number of lanes, and of clients per lane."""
        return {"workers": self.tuning.lanes, "cohort": self.tuning.clients}

    def hints(self) -> list[str]:
        """Return the chosen settings, and the speed-up of lower precisions."""
        name = torch.cuda.get_device_name(self.device)
        return [f"engine: {self.tuning} on {name}, {self.settings.precision}", *faster(self.settings)]

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Distribute jobs to the least loaded lanes and yield results in the order of the jobs."""
        lanes = len(self._lanes)
        source = iter(jobs)
        first = list(islice(source, (AHEAD if self._clients == 1 else LONGEST) * lanes * self._clients))
        each = -(-len(first) // lanes)  # a client that has finished makes room for the next one of its lane
        self._jobs = 1 if self._clients == 1 else max(self._clients, each)
        self._useful = useful_lanes([self._cost(job) for job in first]) if self._clients == 1 else lanes
        for lane in self._lanes:
            lane.load, lane.open = 0, None
        try:
            window = lanes * max(AHEAD * self._clients, 2 * self._jobs)
            yield from ordered(chain(first, source), self._submit, window)
        finally:  # also if the consumer stops early: no work may remain for the next round
            for lane in self._lanes:
                lane.open = None
                lane.settle()

    def _cost(self, job: Job) -> int:
        return len(self.setup.task.samples(job.client)) if job.kind == "update" else 1

    def _submit(self, job: Job) -> Handle:
        """Add a job to the batch of the least loaded lane, and launch the batch when it is full."""
        lane = min(self._lanes[: self._useful], key=lambda lane: lane.load)
        if lane.open is not None and lane.open.jobs[0].kind != job.kind:
            self.launch(lane.open)
        batch = lane.open = lane.open or Batch()
        batch.jobs.append(job)
        lane.load += self._cost(job)
        handle = Handle(self, batch, len(batch.jobs) - 1)
        if len(batch.jobs) == self._jobs:
            self.launch(batch)
        return handle

    def launch(self, batch: Batch) -> None:
        """Launch a batch on its lane, or on another one if that has run out of memory."""
        here = torch.cuda.current_stream()
        made = here.record_event()
        while batch.results is None:
            least = min(self._lanes, key=lambda lane: lane.load)
            lane = next((lane for lane in self._lanes if lane.open is batch), least)
            lane.open = None
            try:
                worker = lane.lane or self._make(lane)
                with torch.cuda.stream(lane.stream):
                    lane.stream.wait_event(made)
                    batch.launched(worker, worker.launch(batch.jobs))
                results: list[Result] = batch.results or []
                for result in results:
                    if result.message is not None and isinstance(result.message.tensors, FlatState):
                        for buffer in result.message.tensors.buffers.values():
                            buffer.record_stream(here)
            except torch.OutOfMemoryError as error:
                error.with_traceback(None).__cause__ = error.__context__ = None  # their frames hold memory
                if not self._made_room(lane):
                    raise

    def _make(self, lane: "_Stream") -> Lane:
        with torch.cuda.stream(lane.stream):
            recorder = Graphs(lane.stream)
            if self._clients == 1:
                lane.lane = Lane(self._workspace, recorder, self._shared)
            else:
                lane.lane = Cohort(self._clients, self._workspace, recorder, self._shared)
        return lane.lane

    def _workspace(self, **options: object) -> Workspace:
        return Workspace(
            self.setup, device=self.device, stored=self.server_workspace.stored, built=self._built,
            precision=self.precision, **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def _made_room(self, lane: "_Stream") -> bool:
        """Continue with one lane fewer, or with half the clients per lane; return False if neither is possible."""
        many, clients = len(self._lanes), self._clients
        lane.close()
        if many > 1:
            self._lanes.remove(lane)
            self._useful = min(self._useful, many - 1)
            words = f"engine.workers: {many} lanes do not fit into the GPU's memory; continuing with {many - 1}"
        elif clients > 1:
            self._clients = clients // 2
            words = f"engine.cohort: {clients} clients do not fit into the GPU's memory; continuing with {clients // 2}"
        else:
            return False
        self._shared.functions.clear()  # compiled functions hold memory
        gc.collect()
        torch.cuda.empty_cache()
        warnings.warn(words, stacklevel=2)
        return True

    def close(self) -> None:
        """Close the lanes."""
        for lane in self._lanes:
            lane.close()
        super().close()


class _Stream:
    """A lane and its CUDA stream, both created on first use."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.open: Batch | None = None
        """The batch that is not full yet."""
        self.load = 0
        """Number of samples assigned to the lane in this round."""
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self.settle()
        self.lane = None


def useful_lanes(costs: list[int]) -> int:
    """Return how many lanes a round can use: more would only slow down the longest job, for which all wait."""
    return max(1, sum(costs) // max(1, *costs)) if costs else 1
