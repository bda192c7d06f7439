"""One single-threaded worker process per core; data are shared, jobs and results travel as bytes.

A worker that dies, or whose client takes too long, is replaced; what it worked on comes back as a failure.
"""

import os
import pickle
import signal
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Timer
from time import monotonic
from typing import ClassVar

import torch
import torch.multiprocessing as multiprocessing

from fedloom.engines.base import Engine, EngineSettings
from fedloom.envelope import MessageError
from fedloom.errors import RunError
from fedloom.failures import Failure
from fedloom.interrupts import ignore_in_worker
from fedloom.job import Job, Result, attempt
from fedloom.lane import Arithmetic, Lane, Setup
from fedloom.message import Message

AHEAD = 4
"""Jobs per worker that may be given out before the result whose turn it is."""
TRIES = 3
"""How often a job is given out that is no client's update, when workers die of it; and how often a worker may die
before it is ready for its first job."""
CRASHED = 70
"""Exit code of a worker that the recipe's `faults` let crash."""
READY = b"ready"


class WorkerError(RunError):
    """Worker processes cannot be kept alive."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False  # once it has said so: time before that is nobody's fault
    message: Message | None = None  # the last one sent: the whole round's clients usually get the same
    job: Job | None = None
    turn: int = -1
    deadline: float | None = None


class Processes(Engine):
    """Clients side by side on the cores of one machine; the same numbers as inline, bit for bit."""

    name: ClassVar[str] = "processes"
    can_stop_clients: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self._count = settings.workers or cores()
        self._workers: list[_Worker] = []
        self._stillborn = 0
        self._again: deque[tuple[int, Job]] = deque()
        self._tries: Counter[int] = Counter()
        self._fill()

    def _fill(self) -> None:
        """As many workers as there should be."""
        if len(self._workers) == self._count:
            return
        # Forked workers have the data, the task and the method as they are, also one of a notebook.
        forks = sys.platform == "linux" and fork_works()
        if not forks:
            self.setup.task.dataset.images.share_memory_()
            self.setup.task.dataset.labels.share_memory_()
        while len(self._workers) < self._count:
            self._workers.append(self._hire(forks))

    def _hire(self, forks: bool) -> _Worker:
        context = multiprocessing.get_context("fork" if forks else "spawn")
        here, there = context.Pipe()
        ours = [here, *(worker.pipe for worker in self._workers)] if forks else []
        arguments = (there, self.setup, self.numbers, ours)
        process = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        try:
            with quiet_fork():
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkerError(
                "engine.name = 'processes': here a worker cannot be forked, and what it needs cannot be sent to it "
                f"({error}); define methods at the top of a module, or use engine.name = 'inline'"
            ) from error
        there.close()
        return _Worker(process, here)

    def _dismiss(self, worker: _Worker) -> int | None:
        """Ends a worker, whatever it does; returns its exit code."""
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        return worker.process.exitcode

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Idle workers take the next job; results wait until their turn comes, a bounded number of them."""
        waiting = enumerate(jobs)
        self._again.clear()
        self._tries.clear()
        done: dict[int, Result] = {}
        turn = 0
        try:
            while True:
                self._fill()
                self._give_out(waiting, before=turn + AHEAD * self._count)
                self._look_ahead(waiting)
                if not self._again and not any(worker.job for worker in self._workers):
                    return
                done |= self._news()
                while turn in done:
                    yield done.pop(turn)
                    turn += 1
        finally:  # whoever stops listening must not leave jobs to the next round
            for worker in [w for w in self._workers if w.job is not None]:
                self._dismiss(worker)

    def _give_out(self, waiting: Iterator[tuple[int, Job]], before: int) -> None:
        """Hands jobs to idle workers, unless there are none or their turns are too far ahead."""
        for worker in [w for w in self._workers if w.job is None and w.ready]:
            self._look_ahead(waiting)
            if not self._again or self._again[0][0] >= before:
                return
            turn, job = self._again.popleft()
            if not self._give(worker, turn, job):  # it died while it was idle: the job was not begun
                self._again.appendleft((turn, job))

    def _look_ahead(self, waiting: Iterator[tuple[int, Job]]) -> None:
        if not self._again and (item := next(waiting, None)) is not None:
            self._again.append(item)

    def _give(self, worker: _Worker, turn: int, job: Job) -> bool:
        data = job.to_bytes(with_message=job.message is not worker.message)
        try:
            with self._watched(worker, job):
                worker.pipe.send_bytes(data)
        except OSError:
            self._dismiss(worker)
            return False
        worker.turn, worker.job, worker.message = turn, job, job.message
        limit = self.settings.client_timeout
        worker.deadline = monotonic() + limit if limit and job.kind == "update" else None
        return True

    def _news(self) -> dict[int, Result]:
        """Waits for workers; results and failures by turn."""
        pending = [w for w in self._workers if w.job is not None or not w.ready]
        deadlines = [w.deadline for w in pending if w.deadline is not None]
        wait_for = max(0.0, min(deadlines) - monotonic()) if deadlines else None
        talking = set(wait([w.pipe for w in pending], wait_for)) if pending else set()
        done: dict[int, Result] = {}
        for worker in pending:
            if worker.pipe in talking:
                done |= self._heard(worker)
            elif worker.deadline is not None and monotonic() > worker.deadline:
                done |= self._late(worker)
        return done

    def _heard(self, worker: _Worker) -> dict[int, Result]:
        """A worker is ready, has a result, or is gone."""
        try:
            with self._watched(worker, worker.job):
                answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self._gone(worker)
        if not worker.ready:
            worker.ready, self._stillborn = True, 0
            return {}
        assert worker.job is not None
        try:
            result = Result.from_bytes(answer)
        except MessageError as error:
            result = Result(worker.job.client, error=Failure("invalid", str(error)))
        turn, worker.job, worker.deadline = worker.turn, None, None
        return {turn: result}

    def _late(self, worker: _Worker) -> dict[int, Result]:
        job = worker.job
        assert job is not None
        self._dismiss(worker)
        why = f"no answer within engine.client_timeout = {self.settings.client_timeout:g} s; its worker is replaced"
        return {worker.turn: Result(job.client, error=Failure("timed_out", why, injected=job.delay > 0))}

    def _gone(self, worker: _Worker) -> dict[int, Result]:
        job, turn = worker.job, worker.turn
        if job is not None and worker.deadline is not None and monotonic() > worker.deadline:
            return self._late(worker)  # the watch ended it
        code = self._dismiss(worker)
        if job is None:
            self._stillborn += 1
            if self._stillborn >= TRIES:
                raise WorkerError(
                    f"engine.name = 'processes': {TRIES} worker processes died before their first job (exit code "
                    f"{code}); use engine.name = 'inline' to see what happens"
                )
            return {}
        if job.kind != "update":  # nobody else can do it, and the result does not depend on where it is done
            self._tries[turn] += 1
            if self._tries[turn] < TRIES:
                self._again.appendleft((turn, job))
                return {}
        injected = job.fault == "crash" and code == CRASHED
        why = "it crashed (faults.crash)" if injected else f"its worker process died ({_exit(code)}) and is replaced"
        return {turn: Result(job.client, error=Failure("died", why, injected=injected))}

    @contextmanager
    def _watched(self, worker: _Worker, job: Job | None) -> Iterator[None]:
        """Ends a worker that stops in the middle of talking, where there is a limit to a client's time."""
        limit = self.settings.client_timeout
        if limit is None or job is None or job.kind != "update":
            yield
            return
        timer = Timer(limit, worker.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

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
            worker.process.join(0 if worker.job is not None else 5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


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
    try:
        pipe.send_bytes(READY)
        while True:
            job = Job.from_bytes(pipe.recv_bytes(), known=message)
            message = job.message
            if job.fault == "crash":
                os._exit(CRASHED)
            pipe.send_bytes(attempt(lane, job).to_bytes())
    except (EOFError, OSError):
        return
