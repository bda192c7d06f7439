"""Clients on a Ray cluster, or on a Ray instance started on this machine. Each worker is a Ray actor.

The dataset is stored in the object store once per node. A worker that dies or does not respond, possibly because its
node is down, is replaced, and its jobs are repeated on another worker.
"""

import logging
import os
import pickle
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

from fedloom.core.errors import UserError, brief
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.setup import Precision, Setup
from fedloom.core.signals import SIGNALS
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.cuda.lanes import AHEAD, Lanes
from fedloom.engines.cuda.tuning import tune
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
    """The Ray actor: runs jobs in an engine, which is `lanes` on a GPU and `inline` otherwise."""

    def __init__(self, setup: tuple[type, Setup], settings: EngineSettings):
        # Results are copied when they are read, so that the object store can free them.
        import_ray().util.register_serializer(Tensor, serializer=to_array, deserializer=to_new_tensor)
        inner = settings.model_copy(update={"workers": None, "device": "cuda" if settings.worker_gpus else "cpu"})
        self._engine: Engine = (Lanes if settings.worker_gpus else Inline)(setup[1], inner)

    def run(self, jobs: list[tuple[Job, int]], *messages: Message) -> list[Result]:
        """Run jobs, which are given without their messages, but with indices into `messages`."""
        complete = [replace(job, message=messages[index]) for job, index in jobs]
        return [portable(result) for result in self._engine.run(complete)]

    def heartbeat(self) -> int:
        """Return the process id. Works while jobs are running, because it has a separate thread."""
        return os.getpid()


@dataclass(kw_only=True, eq=False)
class _Worker(Worker):
    actor: Any
    reply: Any
    """Reference to its next report: the first heartbeat, then the results of its jobs."""
    heartbeat: Any = None
    """Reference to a requested heartbeat that has not arrived yet."""
    asked: float = 0.0
    """Time of the last heartbeat, of its request, or of sending jobs, whichever is the latest."""


class Ray(WorkerPool[_Worker]):
    """Clients in parallel on the machines of a cluster; bit-identical to inline on CPUs."""

    name: ClassVar[str] = "ray"
    vectorises: ClassVar[bool] = True
    retries_updates: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        if settings.worker_gpus and settings.client_timeout:
            raise UserError(
                f"engine.client_timeout = {settings.client_timeout:g}: with engine.worker_gpus = "
                f"{settings.worker_gpus:g} a worker runs many clients at once and cannot stop one; remove one setting"
            )
        if settings.worker_gpus and len(setup.variants) > 1:
            raise UserError(
                f"engine.worker_gpus = {settings.worker_gpus:g}: workers with a GPU run lanes, which need the same "
                "network for all clients; use engine.worker_gpus = 0"
            )
        self._ray = import_ray()
        super().__init__(setup, settings)
        self._undo.enter_context(connected(self._ray, settings))
        # Ray would copy tensors, but maps arrays read-only from the object store.
        self._ray.util.register_serializer(Tensor, serializer=to_array, deserializer=to_tensor)
        self._undo.callback(self._ray.util.deregister_serializer, Tensor)
        self.size = settings.workers or self._capacity()
        self.batch = self._jobs_at_once() if settings.worker_gpus else self.share(settings.clients_per_step)
        # Methods are pickled by class name, so the class comes first: by value if defined in a script or notebook.
        try:
            self._setup = self._ray.put((setup.method.plain, setup))
        except (TypeError, pickle.PicklingError) as error:
            raise UserError(
                f"engine.name = 'ray': the method, network or optimizer cannot be sent to workers ({brief(error)}); "
                "remove what cannot be pickled from it, or use engine.name = 'inline'"
            ) from error
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
        """Return the server's precision on this CPU; workers with GPUs determine theirs separately."""
        if self.settings.worker_gpus:
            return Precision(channels_last=self.settings.channels_last)
        return super()._precision()

    def _capacity(self) -> int:
        """Return the number of workers that fit into the cluster."""
        have, settings = self._ray.cluster_resources(), self.settings
        workers = int(have.get("CPU", 0) // settings.worker_cpus)
        if settings.worker_gpus:
            workers = min(workers, int(have.get("GPU", 0) // settings.worker_gpus))
        return max(1, workers)

    def _jobs_at_once(self) -> int:
        """Return the number of jobs to send to a GPU worker at a time: several for each slot of its lanes."""
        parameters = sum(parameter.numel() for parameter in self.server_workspace.parts.parameters())
        tuning = tune(self.setup, self.settings.model_copy(update={"workers": None}), parameters, free=sys.maxsize)
        return self.share(AHEAD * tuning.lanes * tuning.clients)

    def _start(self) -> _Worker:
        settings = self.settings
        if not settings.worker_gpus:
            settings = settings.model_copy(update={"cohort": self.batch})
        actor = self._actor.remote(self._setup, settings)
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
        """Put a message into the object store once: usually all clients of a round receive the same one."""
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
                silence = f"no heartbeat for engine.lost_after = {self.settings.lost_after:g} s"
                self._lose(worker, WorkerLostError(silence))
        self._check_start()
        return reporting

    def _silent(self, worker: _Worker) -> bool:
        """Return whether a heartbeat of a busy worker is overdue; otherwise request the next one."""
        if worker.heartbeat is not None and self._ray.wait([worker.heartbeat], timeout=0)[0]:
            worker.heartbeat, worker.asked = None, monotonic()
        if worker.heartbeat is None and monotonic() - worker.asked > POLL:
            worker.heartbeat, worker.asked = _heartbeat(worker.actor), monotonic()
        return worker.heartbeat is not None and monotonic() - worker.asked > self.settings.lost_after

    def _receive(self, worker: _Worker) -> list[Result]:
        errors = self._ray.exceptions
        try:
            report = self._ray.get(worker.reply, timeout=self.settings.lost_after)
        except errors.RayTaskError:  # an error in the worker itself: errors of clients are results
            raise
        except errors.RayError as error:
            lines = str(error).splitlines()  # the last line says why a worker could not start
            raise WorkerLostError(f"{type(error).__name__}: {lines[0 if worker.ready else -1]}") from error
        worker.reply = None
        return report if worker.ready else []

    def _lose(self, worker: _Worker, lost: WorkerLostError) -> None:
        if worker.ready and not worker.late:
            log.warning(f"a Ray worker was lost and is replaced; another worker repeats its jobs ({lost})")
        if worker.ready:
            self._none_ready_since = monotonic()
        super()._lose(worker, lost)

    def _kill(self, worker: _Worker) -> None:
        with suppress(Exception):  # the cluster may already be down
            self._ray.kill(worker.actor)

    def _check_start(self) -> None:
        """Check that a worker has been ready recently.

        Raises:
            WorkerError: No worker has been ready for START seconds.
        """
        if any(worker.ready for worker in self._workers):
            self._none_ready_since = monotonic()
        elif monotonic() - self._none_ready_since > START:
            raise WorkerError(
                f"engine.name = 'ray': no worker was ready within {START:g} s; engine.worker_cpus = "
                f"{self.settings.worker_cpus:g} and engine.worker_gpus = {self.settings.worker_gpus:g} must be free on "
                f"some node, but the cluster has {self._ray.cluster_resources()}"
            )


def _heartbeat(actor: Any) -> Any:
    return actor.heartbeat.options(concurrency_group="heartbeat").remote()


def import_ray() -> Any:
    """Import Ray with telemetry disabled and tokens required, which it reads from the environment on import.

    Raises:
        UserError: Ray is not installed.
    """
    if "ray" not in sys.modules:  # the variables have no effect after the import
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"engine.name = 'ray': Ray cannot be imported ({error}); install it: pip install 'fedloom[ray]'"
        ) from error
    return ray


@contextmanager
def connected(ray: Any, settings: EngineSettings) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine and stop it at the end; use an existing connection unchanged.

    Raises:
        UserError: Ray cannot be started, or the cluster cannot be reached.
    """
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
            for number in SIGNALS:  # Ray installs signal handlers; restore ours
                undo.callback(signal.signal, number, signal.getsignal(number))
        try:
            ray.init(log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UserError(
                f"engine.address = {settings.address!r}: Ray cannot start or connect ({error}); the cluster's address "
                "is printed by `ray start --head`; its token must be in RAY_AUTH_TOKEN or ~/.ray/auth_token here, too"
            ) from error
    try:
        yield
    finally:
        ray.shutdown(wait_for_processes=True)


def _isolate(undo: ExitStack, ray: Any) -> None:
    """Make a local Ray instance listen on the loopback address only, with a separate token and session.

    Ray does this by default on systems where it does not support clusters; the same switch works on the others. In a
    separate session Ray does not receive signals sent to this program's process group, so that the round can be
    finished.
    """
    constants = ray._private.ray_constants
    undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
    constants.ENABLE_RAY_CLUSTER = False
    if ray._private.utils.detect_fate_sharing_support():  # otherwise Ray ends its processes via their process group
        services = ray._private.services
        undo.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
    for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_AUTH_TOKEN", _token())):
        if name not in os.environ and not (name == "RAY_AUTH_TOKEN" and "RAY_AUTH_TOKEN_PATH" in os.environ):
            os.environ[name] = value
            undo.callback(os.environ.pop, name, None)


@cache
def _token() -> str:
    """Return the token of all Ray instances that this process starts: Ray reads it only once."""
    return secrets.token_hex(32)
