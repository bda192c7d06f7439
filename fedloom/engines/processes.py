"""One single-threaded worker process per core. The dataset is shared memory; jobs and results are pickled.

A worker that dies, or whose client takes too long, is replaced, and the update that it was running fails.
"""

import os
import pickle
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch
import torch.multiprocessing as multiprocessing

from fedloom.core.errors import brief
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.signals import ignore_in_worker
from fedloom.engines.base import EngineSettings, channels_last_hint, cohort_hint
from fedloom.engines.inline import Inline
from fedloom.engines.pickling import ByValue, receive, send
from fedloom.engines.pool import NO_MESSAGE, Worker, WorkerError, WorkerLostError, WorkerPool, portable

CRASHED = 70
"""Exit code of a worker that was ended by the injected fault `faults.crash`."""
QUICK = 0.01
"""Clients faster than this many seconds may have one job queued behind them; slower ones would block it."""
SMALL = 2**15
"""Maximum bytes of a queued job: a larger one may not fit into the socket's buffer, and both sides would block."""


@dataclass(kw_only=True, eq=False)
class _Worker(Worker):
    process: BaseProcess
    socket: socket.socket
    message: Message | None = None
    """The message that was sent last: usually all clients of a round receive the same one."""
    quick: bool = False
    """Whether the worker's last client took less than QUICK seconds."""


class Processes(WorkerPool[_Worker]):
    """Clients in parallel on the cores of one machine; bit-identical to inline."""

    name: ClassVar[str] = "processes"
    vectorises: ClassVar[bool] = True
    # On one machine, the client is the most likely reason for its worker's death.
    retries_updates: ClassVar[bool] = False

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self.size = settings.workers or cores()
        self.batch = self.share(settings.clients_per_step)
        self._inner = settings.model_copy(update={"device": "cpu", "cohort": self.batch})
        """The settings of a worker's engine."""
        self._fill()

    def hints(self) -> list[str]:
        """Return settings that would be faster."""
        return [*channels_last_hint(self), *cohort_hint(self, self.share(sys.maxsize))]

    def _fill(self) -> None:
        if len(self._workers) < self.size:
            # Forked workers inherit data, task and method, including methods defined in a notebook.
            self._forks = sys.platform == "linux" and fork_works()
            if not self._forks:
                self.setup.task.dataset.inputs.share_memory_()
                self.setup.task.dataset.labels.share_memory_()
            super()._fill()

    def _start(self) -> _Worker:
        here, there = socket.socketpair()
        # Large enough for a small model, if the system allows it: the worker need not wait until its result is read.
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        # A worker must close inherited sockets: otherwise other workers would not notice when they are closed here.
        inherited = [here, *(worker.socket for worker in self._workers)] if self._forks else []
        context: Any = multiprocessing.get_context("fork" if self._forks else "spawn")
        setup = self.setup if self._forks else ByValue(self.setup.method.plain, self.setup)
        process = context.Process(target=_serve, args=(there, setup, self._inner, inherited), daemon=True)
        try:
            with quiet_fork():
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkerError(
                "engine.name = 'processes': workers cannot be forked here, and the experiment cannot be pickled "
                f"({brief(error)}); install cloudpickle, define the object at the top level of a module, or use "
                "engine.name = 'inline'"
            ) from error
        there.close()
        return _Worker(process=process, socket=here)

    def _accepts(self, worker: _Worker, job: Job) -> bool:
        """Return whether a worker can be sent this job, possibly queued behind a quick client.

        The worker then starts it while its previous result is being read. This is disabled with a timeout, which counts
        from when a job is sent, and if a worker gets several jobs at a time.
        """
        if super()._accepts(worker, job):
            return True
        if self.batch > 1:
            return False
        small = job.message is worker.message and nbytes(job.memory or {}) + 8 * len(job.clients) < SMALL
        return worker.quick and len(worker.tasks) < 2 and small and self.settings.client_timeout is None

    def _send(self, worker: _Worker, jobs: list[Job]) -> None:
        # A worker that hangs while sending or receiving must not block the round.
        worker.socket.settimeout(self.settings.client_timeout if jobs[0].kind == "update" else None)
        sent = []
        for job in jobs:
            sent.append((replace(job, message=NO_MESSAGE), None if job.message is worker.message else job.message))
            worker.message = job.message
        try:
            send(worker.socket, sent)
        except OSError as error:
            raise WorkerLostError(str(error)) from error

    def _poll(self, timeout: float | None) -> Iterable[_Worker]:
        reporting = wait([worker.socket for worker in self._workers], timeout)
        return [worker for worker in self._workers if worker.socket in reporting]

    def _receive(self, worker: _Worker) -> list[Result]:
        try:
            received: list[Result] = receive(worker.socket)
        except (EOFError, OSError) as error:
            self._kill(worker)
            code = worker.process.exitcode
            raise WorkerLostError("faults.crash" if code == CRASHED else _exit(code), code == CRASHED) from error
        worker.quick = worker.ready and received[0].seconds < QUICK
        return received

    def _kill(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.socket.close()

    def close(self) -> None:
        """End the workers. Idle ones exit regularly, so that their output buffers are flushed."""
        idle = [worker for worker in self._workers if worker.ready and not worker.tasks]
        for worker in idle:
            worker.socket.close()
        for worker in idle:
            worker.process.join(5)
        super().close()


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Suppress Python 3.12's warning about forks of multi-threaded processes: workers need nothing of other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def fork_works() -> bool:
    """Return whether a forked process can train: torch's CUDA builds do not support it after training in the parent."""
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
    """Return the number of cores that this process may use, which a scheduler may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(
    server: socket.socket, setup: Setup | ByValue, settings: EngineSettings, inherited: list[socket.socket]
) -> None:
    """Run jobs in a worker process until the engine closes the socket."""
    if isinstance(setup, ByValue):
        setup = setup.values[-1]
    assert isinstance(setup, Setup)
    for other in inherited:
        other.close()
    ignore_in_worker()
    engine = Inline(setup, settings)
    message = NO_MESSAGE
    with suppress(EOFError, OSError):
        send(server, [])  # ready
        while True:
            jobs = []
            for job, new_message in receive(server):
                message = message if new_message is None else new_message
                jobs.append(replace(job, message=message))
            results = [portable(result) for result in engine.run(jobs)]
            if len(results) == 1 and results[0].error is not None and results[0].error.kind == "died":
                os._exit(CRASHED)  # an injected crash
            send(server, results)
