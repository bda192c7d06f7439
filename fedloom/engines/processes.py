"""One single-threaded worker process per core; data are shared, jobs and results travel as bytes."""

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import ClassVar

import torch

from fedloom.engines.base import Engine, EngineSettings
from fedloom.job import Job, Result, perform
from fedloom.lane import Lane, Setup
from fedloom.message import Message


class WorkerError(RuntimeError):
    """A client's job failed in a worker process."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    message: Message | None = None  # the last one sent: the whole round's clients usually get the same
    job: Job | None = None
    turn: int = -1


class Processes(Engine):
    """Clients side by side on the cores of one machine; the same numbers as inline, bit for bit."""

    name: ClassVar[str] = "processes"

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        setup.task.dataset.images.share_memory_()
        setup.task.dataset.labels.share_memory_()
        # Forked workers have the task and the method as they are, also ones defined in a script or a notebook.
        self._forks = "fork" in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("fork" if self._forks else "spawn")
        self._workers: list[_Worker] = []
        for _ in range(settings.workers or os.cpu_count() or 1):
            self._workers.append(self._hire())

    def _hire(self) -> _Worker:
        here, there = self._context.Pipe()
        ours = [here, *(worker.pipe for worker in self._workers)] if self._forks else []
        arguments = (there, self.setup, ours)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with (
            warnings.catch_warnings()
        ):  # Python 3.12 warns of any fork beside threads; ours hold nothing a worker needs
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return _Worker(process, here)

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Idle workers take the next job; results wait until their turn comes."""
        waiting = enumerate(jobs)
        done: dict[int, Result] = {}
        turn = 0
        for worker in self._workers:
            self._give(worker, waiting)
        while busy := [w for w in self._workers if w.job is not None]:
            for pipe in wait([w.pipe for w in busy]):
                worker = next(w for w in busy if w.pipe is pipe)
                assert worker.job is not None
                done[worker.turn] = self._take(worker, worker.job)
                self._give(worker, waiting)
            while turn in done:
                yield done.pop(turn)
                turn += 1

    def _give(self, worker: _Worker, waiting: Iterator[tuple[int, Job]]) -> None:
        worker.turn, worker.job = next(waiting, (-1, None))
        if worker.job is not None:
            same = worker.job.message is worker.message
            worker.message = worker.job.message
            worker.pipe.send_bytes(worker.job.to_bytes(with_message=not same))

    def _take(self, worker: _Worker, job: Job) -> Result:
        try:
            answer = worker.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            worker.process.join(1)
            raise WorkerError(
                f"the worker of client {job.client} died in round {job.round} (exit code {worker.process.exitcode})"
            ) from None
        if answer[:1] == b"!":
            raise WorkerError(f"client {job.client} failed in round {job.round}:\n{answer[1:].decode()}")
        return Result.from_bytes(answer[1:])

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
        self._workers = []


def _serve(pipe: Connection, setup: Setup, inherited: list[Connection]) -> None:
    """A worker's life: a job in, a result out, until the pipe closes."""
    for other in inherited:  # a copy left open here would keep this worker, or another, from seeing the end
        other.close()
    torch.set_num_threads(1)
    lane = Lane(setup)
    message: Message | None = None
    while True:
        try:
            job = Job.from_bytes(pipe.recv_bytes(), known=message)
        except (EOFError, OSError, KeyboardInterrupt):
            return
        message = job.message
        try:
            answer = b"=" + perform(lane, job).to_bytes()
        except KeyboardInterrupt:
            return
        except Exception:
            answer = b"!" + traceback.format_exc().encode()
        try:
            pipe.send_bytes(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
