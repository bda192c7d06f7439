"""One single-threaded worker process per core; data are shared, jobs and results travel as bytes."""

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import ClassVar

import torch
import torch.multiprocessing as multiprocessing

from fedloom.engines.base import Engine, EngineSettings
from fedloom.interrupts import ignore_in_worker
from fedloom.job import Job, Result, perform
from fedloom.lane import Arithmetic, Lane, Setup
from fedloom.message import Message

AHEAD = 4
"""Jobs per worker that may be given out before the result whose turn it is."""


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
        # Forked workers have the data, the task and the method as they are, also one of a notebook.
        self._forks = sys.platform == "linux" and fork_works()
        if not self._forks:
            setup.task.dataset.images.share_memory_()
            setup.task.dataset.labels.share_memory_()
        self._context = multiprocessing.get_context("fork" if self._forks else "spawn")
        self._next: tuple[int, Job] | None = None
        self._workers: list[_Worker] = []
        for _ in range(settings.workers or cores()):
            self._workers.append(self._hire())

    def _hire(self) -> _Worker:
        here, there = self._context.Pipe()
        ours = [here, *(worker.pipe for worker in self._workers)] if self._forks else []
        arguments = (there, self.setup, self.numbers, ours)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        with quiet_fork():
            process.start()
        there.close()
        return _Worker(process, here)

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Idle workers take the next job; results wait until their turn comes, a bounded number of them."""
        waiting = enumerate(jobs)
        self._next = None
        done: dict[int, Result] = {}
        turn = 0
        idle = list(self._workers)
        while True:
            while idle and self._give(idle[-1], waiting, before=turn + AHEAD * len(self._workers)):
                idle.pop()
            busy = [w for w in self._workers if w.job is not None]
            if not busy:
                return
            for pipe in wait([w.pipe for w in busy]):
                worker = next(w for w in busy if w.pipe is pipe)
                assert worker.job is not None
                done[worker.turn] = self._take(worker, worker.job)
                worker.job = None
                idle.append(worker)
            while turn in done:
                yield done.pop(turn)
                turn += 1

    def _give(self, worker: _Worker, waiting: Iterator[tuple[int, Job]], before: int) -> bool:
        """Hands the worker a job, unless there is none or its turn is too far ahead."""
        if self._next is None:
            self._next = next(waiting, None)
        if self._next is None or self._next[0] >= before:
            return False
        worker.turn, worker.job = self._next
        self._next = None
        same = worker.job.message is worker.message
        worker.message = worker.job.message
        worker.pipe.send_bytes(worker.job.to_bytes(with_message=not same))
        return True

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

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # nobody waits for what workers are doing
            for worker in self._workers:
                worker.process.kill()
        super().__exit__(*error)

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
        self._workers = []


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Python 3.12 warns of any fork beside threads; ours hold nothing that a worker needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def fork_works() -> bool:
    """Whether a forked process could still train: after training here, torch's CUDA builds refuse it there."""
    with quiet_fork():
        child = os.fork()
    if child == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def cores() -> int:
    """Cores that this process may use (a cluster's scheduler may have left it fewer than there are)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(pipe: Connection, setup: Setup, numbers: Arithmetic, inherited: list[Connection]) -> None:
    """A worker's life: a job in, a result out, until the pipe closes."""
    for other in inherited:  # a copy left open here would keep this worker, or another, from seeing the end
        other.close()
    ignore_in_worker()
    torch.set_num_threads(1)
    lane = Lane(setup, numbers=numbers)
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
