"""Clients on a Ray cluster, or on a Ray that is started on this machine. A worker is an actor.

Data are placed in the object store once per node. A worker that dies or falls silent, alone or with its node, is
replaced, and another repeats its jobs: losing a machine is no client's fault.
"""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from time import monotonic
from typing import Any, ClassVar

from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.signals import SIGNALS
from fedloom.core.workspace import Precision, Setup
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.cuda.lanes import AHEAD, Lanes
from fedloom.engines.cuda.tuning import per_round, tune
from fedloom.engines.inline import Inline
from fedloom.engines.pickling import to_array, to_new_tensor, to_tensor
from fedloom.engines.pool import NO_MESSAGE, Worker, WorkerError, WorkerLostError, WorkerPool, portable
from fedloom.engines.processes import cores

POLL = 1.0
"""Seconds between heartbeats of a busy worker."""
START = 300.0
"""Seconds within which a worker must be ready."""
log = logging.getLogger("fedloom")


class RayWorker:
    """The actor: runs jobs in an engine, which is `lanes` on a GPU."""

    def __init__(self, setup: tuple[type, Setup], settings: EngineSettings):
        # Results are copied out of the object store where they are read, so that the store stays small.
        import_ray().util.register_serializer(Tensor, serializer=to_array, deserializer=to_new_tensor)
        inner = settings.model_copy(update={"workers": None, "device": "cuda" if settings.worker_gpus else "cpu"})
        self._engine: Engine = (Lanes if settings.worker_gpus else Inline)(setup[1], inner)

    def run(self, jobs: list[tuple[Job, int]], *messages: Message) -> list[Result]:
        """Runs jobs; each comes without its message, and with the message's index."""
        complete = [replace(job, message=messages[index]) for job, index in jobs]
        return [portable(result) for result in self._engine.run(complete)]

    def heartbeat(self) -> int:
        """Returns the process id, also while jobs run: it has its own thread."""
        return os.getpid()


@dataclass(kw_only=True, eq=False)
class _Worker(Worker):
    actor: Any
    reply: Any
    """reference to what it reports next: the first heartbeat, then the results of its jobs"""
    heartbeat: Any = None
    """reference to a heartbeat that was asked for and did not come yet"""
    asked: float = 0.0
    """when the last heartbeat was asked for or came, or the jobs were sent"""


class Ray(WorkerPool[_Worker]):
    """Clients side by side on the machines of a cluster; the same numbers as inline on CPUs, bit for bit."""

    name: ClassVar[str] = "ray"
    retries_updates: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        if settings.worker_gpus and settings.client_timeout:
            raise UserError(
                f"engine.client_timeout = {settings.client_timeout:g}: with engine.worker_gpus = "
                f"{settings.worker_gpus:g} a worker runs many clients at once and cannot stop one; remove one of them"
            )
        self._ray = import_ray()
        super().__init__(setup, settings)
        self._undo.enter_context(connected(self._ray, settings))
        # Ray copies tensors; arrays it maps, read-only, from the object store.
        self._ray.util.register_serializer(Tensor, serializer=to_array, deserializer=to_tensor)
        self._undo.callback(self._ray.util.deregister_serializer, Tensor)
        self.size = settings.workers or self._capacity()
        self.batch = self._jobs_at_once() if settings.worker_gpus else 1
        # A method is pickled by its name: first the class, whole if it is a script's or a notebook's.
        self._setup = self._ray.put((setup.method.plain, setup))
        self._placed: tuple[Message, Any] | None = None
        self._actor = self._ray.remote(
            num_cpus=settings.worker_cpus,
            num_gpus=settings.worker_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"heartbeat": 1},
        )(RayWorker)
        self._none_ready_since = monotonic()
        self._fill()

    def _precision(self) -> Precision:
        """The server's, on this CPU; workers with GPUs have their own."""
        if self.settings.worker_gpus:
            return Precision(channels_last=self.settings.channels_last)
        return super()._precision()

    def _capacity(self) -> int:
        """Workers that fit into the cluster."""
        have, settings = self._ray.cluster_resources(), self.settings
        workers = int(have.get("CPU", 0) // settings.worker_cpus)
        if settings.worker_gpus:
            workers = min(workers, int(have.get("GPU", 0) // settings.worker_gpus))
        return max(1, workers)

    def _jobs_at_once(self) -> int:
        """Jobs that a GPU worker is sent together: two for each place in its lanes, at most its share of a round."""
        parameters = sum(parameter.numel() for parameter in self.server_workspace.parts.parameters())
        tuning = tune(self.setup, self.settings.model_copy(update={"workers": None}), parameters, free=sys.maxsize)
        share = -(-per_round(self.setup) // self.size)
        return max(1, min(AHEAD * tuning.lanes * tuning.clients, share))

    def _start(self) -> _Worker:
        actor = self._actor.remote(self._setup, self.settings)
        return _Worker(actor=actor, reply=_heartbeat(actor))

    def _send(self, worker: _Worker, jobs: list[Job]) -> None:
        messages: list[Any] = []
        sent: list[tuple[Job, int]] = []
        for job in jobs:
            if not messages or messages[-1] is not self._place(job.message):
                messages.append(self._place(job.message))
            sent.append((replace(job, message=NO_MESSAGE), len(messages) - 1))
        worker.reply, worker.asked = worker.actor.run.remote(sent, *messages), monotonic()

    def _place(self, message: Message) -> Any:
        """Puts a message into the object store once: usually all clients of a round get the same."""
        if self._placed is None or self._placed[0] is not message:
            self._placed = message, self._ray.put(message)
        return self._placed[1]

    def _poll(self, timeout: float | None) -> Iterable[_Worker]:
        waiting = {worker.reply: worker for worker in self._workers if worker.reply is not None}
        if not waiting:
            return []
        limit = POLL if timeout is None else min(POLL, timeout)
        there = self._ray.wait(list(waiting), timeout=limit, fetch_local=False)[0]  # one at a time
        reporting = [waiting.pop(reference) for reference in there]
        for worker in waiting.values():
            if worker.tasks and self._silent(worker):
                silence = f"it was silent for engine.lost_after = {self.settings.lost_after:g} s"
                self._lose(worker, WorkerLostError(silence))
        self._check_start()
        return reporting

    def _silent(self, worker: _Worker) -> bool:
        """Whether a heartbeat of a busy worker is overdue; asks for the next one if it is not."""
        if worker.heartbeat is not None and self._ray.wait([worker.heartbeat], timeout=0)[0]:
            worker.heartbeat, worker.asked = None, monotonic()
        if worker.heartbeat is None and monotonic() - worker.asked > POLL:
            worker.heartbeat, worker.asked = _heartbeat(worker.actor), monotonic()
        return worker.heartbeat is not None and monotonic() - worker.asked > self.settings.lost_after

    def _receive(self, worker: _Worker) -> list[Result]:
        errors = self._ray.exceptions
        try:
            report = self._ray.get(worker.reply, timeout=self.settings.lost_after)
        except errors.RayTaskError:  # an error of the worker: a client's would be a result
            raise
        except errors.RayError as error:
            lines = str(error).splitlines()  # why a worker could not start is in the last line
            raise WorkerLostError(f"{type(error).__name__}: {lines[0 if worker.ready else -1]}") from error
        worker.reply = None
        return report if worker.ready else []

    def _lose(self, worker: _Worker, lost: WorkerLostError) -> None:
        if worker.ready and not worker.late:
            log.warning(f"a Ray worker is lost and replaced, another repeats its jobs ({lost})")
        if worker.ready:
            self._none_ready_since = monotonic()
        super()._lose(worker, lost)

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # the cluster may be gone
            self._ray.kill(worker.actor)

    def _check_start(self) -> None:
        """Raises WorkerError if no worker has been ready for too long."""
        if any(worker.ready for worker in self._workers):
            self._none_ready_since = monotonic()
        elif monotonic() - self._none_ready_since > START:
            raise WorkerError(
                f"engine.name = 'ray': no worker was ready within {START:g} s; engine.worker_cpus = "
                f"{self.settings.worker_cpus:g} and engine.worker_gpus = {self.settings.worker_gpus:g} must be free on "
                f"some node, and the cluster has {self._ray.cluster_resources()}"
            )


def _heartbeat(actor: Any) -> Any:
    return actor.heartbeat.options(concurrency_group="heartbeat").remote()


def import_ray() -> Any:
    """Imports Ray with telemetry off and tokens required: it reads its environment when it is imported."""
    if "ray" not in sys.modules:  # too late otherwise
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"engine.name = 'ray' needs Ray, which cannot be imported ({error}): pip install 'fedloom[ray]'"
        ) from error
    return ray


@contextmanager
def connected(ray: Any, settings: EngineSettings) -> Iterator[None]:
    """Connects to a cluster, or starts and ends Ray on this machine; leaves a connection that exists as it is."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": settings.address}
    with ExitStack() as undo:
        if settings.address is None:
            cpus = (settings.workers or cores()) * settings.worker_cpus
            options = {"address": "local", "num_cpus": max(1, round(cpus)), "include_dashboard": False}
            _isolate(undo, ray)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:  # Ray installs its own handlers; restore ours
                undo.callback(signal.signal, number, signal.getsignal(number))
        try:
            ray.init(log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UserError(
                f"engine.address = {settings.address!r}: Ray does not start or connect ({error}); a cluster's address "
                "is what `ray start --head` printed, its token must be in RAY_AUTH_TOKEN or ~/.ray/auth_token here too"
            ) from error
    try:
        yield
    finally:
        ray.shutdown(wait_for_processes=True)


def _isolate(undo: ExitStack, ray: Any) -> None:
    """Makes the Ray that is started here listen on the loopback address only, with its own token and session.

    Ray does so by itself on systems where it supports no clusters; that switch works on others too. In its own session
    it does not get the signals sent to the program's process group, so that the round can be finished.
    """
    constants = ray._private.ray_constants
    undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
    constants.ENABLE_RAY_CLUSTER = False
    if ray._private.utils.detect_fate_sharing_support():  # else Ray ends its processes by their group
        services = ray._private.services
        undo.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
    for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_AUTH_TOKEN", _token())):
        if name not in os.environ and not (name == "RAY_AUTH_TOKEN" and "RAY_AUTH_TOKEN_PATH" in os.environ):
            os.environ[name] = value
            undo.callback(os.environ.pop, name, None)


@cache
def _token() -> str:
    """Returns the token of every Ray that this process starts: Ray reads it once."""
    return secrets.token_hex(32)
