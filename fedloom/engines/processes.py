"""One single-threaded worker process per core; data are shared, jobs and results travel as bytes.

A worker that dies, or whose client takes too long, is replaced; what it worked on comes back as a failure.
"""

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Timer
from time import monotonic
from typing import ClassVar

import torch
import torch.multiprocessing as multiprocessing

from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result, handle
from fedloom.core.message import Message, MessageError
from fedloom.core.signals import ignore_in_worker
from fedloom.core.workspace import Precision, Setup, Workspace
from fedloom.engines.base import EngineSettings
from fedloom.engines.crew import Crew, Given, PoolWorker, WorkerError

CRASHED = 70
"""Exit code of a worker that the recipe's `faults` let crash."""
READY = b"ready"


@dataclass(kw_only=True)
class _Worker(PoolWorker):
    process: BaseProcess
    pipe: Connection
    message: Message | None = None  # the last one sent: the whole round's clients usually get the same


class Processes(Crew[_Worker]):
    """Clients side by side on the cores of one machine; the same numbers as inline, bit for bit."""

    name: ClassVar[str] = "processes"
    can_stop_clients: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self._count = settings.workers or cores()
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
        arguments = (there, self.setup, self.precision, ours)
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
        return _Worker(process=process, pipe=here)

    def _dismiss(self, worker: _Worker) -> int | None:
        """Ends a worker, whatever it does; returns its exit code."""
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        return worker.process.exitcode

    def _give(self, worker: _Worker, batch: list[Given]) -> bool:
        ((_, job),) = batch
        data = job.to_bytes(with_message=job.message is not worker.message)
        try:
            with self._watched(worker, job):
                worker.pipe.send_bytes(data)
        except OSError:  # it died while it was idle: the job was not begun
            self._dismiss(worker)
            return False
        worker.batch, worker.message, worker.deadline = batch, job.message, self._deadline(job)
        return True

    def _news(self) -> dict[int, Result]:
        """Waits for workers; results and failures by turn."""
        pending = [w for w in self._workers if w.batch or not w.ready]
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
            with self._watched(worker, worker.batch[0][1] if worker.batch else None):
                answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self._gone(worker)
        if not worker.ready:
            worker.ready, self._stillborn = True, 0
            return {}
        ((turn, job),) = worker.batch
        try:
            result = Result.from_bytes(answer)
        except MessageError as error:
            result = Result(job.client, error=Failure("invalid", str(error)))
        worker.batch, worker.deadline = [], None
        return {turn: result}

    def _gone(self, worker: _Worker) -> dict[int, Result]:
        if worker.deadline is not None and monotonic() > worker.deadline:
            return self._late(worker)  # the watch ended it
        code = self._dismiss(worker)
        if not worker.batch:
            self._note_stillborn(f"exit code {code}")
            return {}
        ((turn, job),) = worker.batch
        # No update: nobody else can do it, and the result does not depend on where it is done.
        if job.kind != "update" and self._retried(turn, job):
            return {}
        injected = code == CRASHED
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
            worker.process.join(0 if worker.batch else 5)
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


def _serve(pipe: Connection, setup: Setup, precision: Precision, inherited: list[Connection]) -> None:
    """A worker's life: a job in, a result out, until the pipe closes."""
    for other in inherited:  # a copy left open here would keep this worker, or another, from seeing the end
        other.close()
    ignore_in_worker()
    torch.set_num_threads(1)
    lane = Workspace(setup, precision=precision)
    message: Message | None = None
    try:
        pipe.send_bytes(READY)
        while True:
            job = Job.from_bytes(pipe.recv_bytes(), known=message)
            message = job.message
            result = handle(lane, job)
            if result.error is not None and result.error.kind == "died":  # an injected crash
                os._exit(CRASHED)
            pipe.send_bytes(result.to_bytes())
    except (EOFError, OSError):
        return
