"""Clients on a Ray cluster, or on a Ray of this machine's own: an actor is a worker, data are placed once per node.

A worker that dies or falls silent, alone or with its node, is replaced, and another does its jobs: losing a machine is
no client's fault. What comes back is copied out of the object store, so that the store stays small.
"""

import io
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from time import monotonic
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.signals import SIGNALS
from fedloom.core.workspace import Precision, Setup
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.crew import TRIES, Crew, Given, PoolWorker, WorkerError
from fedloom.engines.cuda.lanes import Lanes
from fedloom.engines.cuda.tuning import LANES
from fedloom.engines.inline import Inline
from fedloom.engines.processes import cores

POLL = 1.0
"""Seconds after which silent workers are asked whether they are still there."""
START = 300.0
"""Seconds within which the first worker must be ready."""
NOTHING = Message({})
log = logging.getLogger("fedloom")
SMALL = 2**12
"""Bytes up to which an array stays inside the pickle."""

Parcel = list[np.ndarray]


class Servant:
    """What an actor holds: an engine of its own, lanes on a GPU."""

    def __init__(self, setup: Parcel, settings: EngineSettings):
        inner = settings.model_copy(update={"workers": None, "device": "cuda" if settings.worker_gpus else "cpu"})
        self._engine: Engine = (Lanes if settings.worker_gpus else Inline)(unpack(setup)[1], inner)

    def work(self, jobs: Parcel, *messages: Parcel) -> Parcel:
        """Does jobs; each comes without its message, which may be another's too."""
        received = [Message(unpack(message)) for message in messages]
        given = [replace(job, message=received[which]) for job, which in unpack(jobs)]
        return pack([_sendable(result) for result in self._engine.run(given)])

    def pulse(self) -> int:
        """Answers while it works, in a thread of its own; its process."""
        return os.getpid()


def _sendable(result: Result) -> Result:
    error = None if result.error is None else replace(result.error, cause=None)
    return replace(result, error=error, loss=None if result.loss is None else float(result.loss))


@dataclass(kw_only=True)
class _Worker(PoolWorker):
    actor: Any
    pulse: Any
    """what it was last asked, as a Ray reference; the first answer says that it is ready"""
    answer: Any = None
    heard: float


class Ray(Crew[_Worker]):
    """Clients side by side on the machines of a cluster; the same numbers as inline on CPUs, bit for bit."""

    name: ClassVar[str] = "ray"
    can_stop_clients: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        if settings.worker_gpus and settings.client_timeout:
            raise UserError(
                f"engine.client_timeout = {settings.client_timeout:g}: with engine.worker_gpus = "
                f"{settings.worker_gpus:g} a worker runs many clients at once and cannot stop one; remove one of them"
            )
        self._ray = import_ray()
        super().__init__(setup, settings)
        self._undo.enter_context(connected(self._ray, settings))
        self._count = settings.workers or self._room()
        self.batch = 2 * LANES if settings.worker_gpus else 1
        # A method is pickled by its name: first the class, whole if it is a script's or a notebook's.
        self._setup = self._ray.put(pack((setup.method.plain, setup)))
        self._placed: tuple[Message, Any] | None = None
        resources = {"num_cpus": settings.worker_cpus, "num_gpus": settings.worker_gpus}
        self._hire = self._ray.remote(
            **resources,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"aside": 1},
        )(Servant)
        self._began = monotonic()
        self._fill()

    def _precision(self) -> Precision:
        """Of the server, here on a CPU; workers with GPUs have their own."""
        if self.settings.worker_gpus:
            return Precision(channels_last=self.settings.channels_last)
        return super()._precision()

    def _room(self) -> int:
        """Workers that the cluster has room for."""
        have, settings = self._ray.cluster_resources(), self.settings
        room = int(have.get("CPU", 0) // settings.worker_cpus)
        return max(1, min(room, int(have.get("GPU", 0) // settings.worker_gpus)) if settings.worker_gpus else room)

    def _fill(self) -> None:
        while len(self._workers) < self._count:
            actor = self._hire.remote(self._setup, self.settings)
            self._workers.append(_Worker(actor=actor, pulse=self._ask(actor), heard=monotonic()))

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)

    def _give(self, worker: _Worker, batch: list[Given]) -> bool:
        references: list[Any] = []
        jobs: list[tuple[Job, int]] = []
        for _, job in batch:
            if not references or references[-1] is not self._place(job.message):
                references.append(self._place(job.message))
            jobs.append((replace(job, message=NOTHING), len(references) - 1))
        worker.answer = worker.actor.work.remote(pack(jobs), *references)
        worker.batch, worker.deadline, worker.heard = batch, self._deadline(batch[0][1]), monotonic()
        return True

    def _place(self, message: Message) -> Any:
        """Where the message is in the object store: the whole round's clients usually get the same."""
        if self._placed is None or self._placed[0] is not message:
            self._placed = message, self._ray.put(pack(message.tensors))
        return self._placed[1]

    def _news(self) -> dict[int, Result]:
        """Looks up at least every POLL seconds: nothing is waited for without a limit."""
        pending = {(w.answer if w.batch else w.pulse): w for w in self._workers if w.batch or not w.ready}
        deadlines = [w.deadline - monotonic() for w in pending.values() if w.deadline is not None]
        limit = max(0.0, min(POLL, *deadlines)) if deadlines else POLL
        self._ray.wait(list(pending), num_returns=1, timeout=limit, fetch_local=False)
        there = self._ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)[0]
        done: dict[int, Result] = {}
        for reference in there:
            done |= self._heard(pending.pop(reference), reference)
        for worker in pending.values():
            if worker.deadline is not None and monotonic() > worker.deadline:
                done |= self._late(worker)
            elif worker.batch and self._silent(worker):
                done |= self._gone(worker, f"it was silent for engine.lost_after = {self.settings.lost_after:g} s")
        self._refuse_waiting_for_ever()
        return done

    def _heard(self, worker: _Worker, reference: Any) -> dict[int, Result]:
        """A worker is ready, has results, or is gone."""
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(reference, timeout=self.settings.lost_after)
        except errors.RayTaskError:  # not a client's, which would be a result: the worker's own
            raise
        except errors.RayError as error:
            lines = str(error).splitlines()  # what a worker could not begin for stands at the end
            return self._gone(worker, f"{type(error).__name__}: {lines[0 if worker.ready else -1]}")
        if not worker.ready:
            worker.ready, worker.pulse, self._stillborn = True, None, 0
            return {}
        turns = [turn for turn, _ in worker.batch]
        worker.batch, worker.answer, worker.deadline = [], None, None
        return dict(zip(turns, unpack(answer, copy=True), strict=True))

    def _silent(self, worker: _Worker) -> bool:
        """Whether a worker at work has not answered any question for too long."""
        if worker.pulse is not None and self._ray.wait([worker.pulse], timeout=0)[0]:
            worker.pulse, worker.heard = None, monotonic()
        elif worker.pulse is None and monotonic() - worker.heard > POLL:
            worker.pulse = self._ask(worker.actor)
        return monotonic() - worker.heard > self.settings.lost_after

    @staticmethod
    def _ask(actor: Any) -> Any:
        return actor.pulse.options(concurrency_group="aside").remote()

    def _gone(self, worker: _Worker, why: str) -> dict[int, Result]:
        """A worker is lost: its jobs go to others, and are failures only when that was tried often enough."""
        self._dismiss(worker)
        if not worker.ready:
            self._note_stillborn(why)
            return {}
        self._began = monotonic()  # before, nobody may have waited for long
        log.warning(f"a Ray worker is lost and replaced, its work is done by another ({why})")
        lost = f"{TRIES} Ray workers were lost with it, the last: {why}"
        left = [(turn, job) for turn, job in reversed(worker.batch) if not self._retried(turn, job)]
        return {turn: Result(job.client, error=Failure("died", lost)) for turn, job in left}

    def _refuse_waiting_for_ever(self) -> None:
        if any(worker.ready for worker in self._workers):
            self._began = monotonic()
        elif monotonic() - self._began > START:
            raise WorkerError(
                f"engine.name = 'ray': no worker was ready within {START:g} s; engine.worker_cpus = "
                f"{self.settings.worker_cpus:g} and engine.worker_gpus = {self.settings.worker_gpus:g} must be free on "
                f"some node, and the cluster has {self._ray.cluster_resources()}"
            )

    def close(self) -> None:
        """Ends the workers, and Ray if it was started here."""
        for worker in list(self._workers):
            with suppress(Exception):  # the cluster may be gone
                self._dismiss(worker)
        super().close()


def pack(value: Any) -> Parcel:
    """An object for Ray's store: the pickle, then the arrays that it refers to, which a reader maps instead of copying.

    What is mapped is read-only. It is pickle, for one's own machines: nothing here is for data from strangers.
    """
    from ray import cloudpickle  # also of methods that were written in a notebook

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return _array(value) if type(value) is Tensor else cloudpickle.Pickler.reducer_override(self, value)

    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > SMALL:
            buffers.append(raw)
        return raw.nbytes <= SMALL

    file = io.BytesIO()
    pickler: Any = Pickler
    pickler(file, protocol=5, buffer_callback=keep_inside).dump(value)
    return [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *buffers)]


def unpack(parcel: Parcel, *, copy: bool = False) -> Any:
    """The inverse; with `copy` nothing of it stays in the store."""
    data, *buffers = parcel
    return pickle.loads(data.data, buffers=[buffer.copy() for buffer in buffers] if copy else buffers)


def _array(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is pickled: NumPy has no bfloat16, whose bits travel as integers."""
    flat = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    brief = flat.dtype == torch.bfloat16
    return _tensor, ((flat.view(torch.int16) if brief else flat).numpy(), brief)


def _tensor(array: np.ndarray, brief: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if brief else tensor


def import_ray() -> Any:
    """The package, which reads its environment when it is imported: no telemetry, nobody without the token."""
    if "ray" not in sys.modules:  # else Ray itself asks for a token, unless RAY_AUTH_MODE says otherwise
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
    """Connects to a cluster, or starts Ray here and ends it; one that this process uses already is left as it is."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": settings.address}
    with ExitStack() as undo:
        if settings.address is None:
            cpus = (settings.workers or cores()) * settings.worker_cpus
            options = {"address": "local", "num_cpus": max(1, round(cpus)), "include_dashboard": False}
            _stay_here(undo, ray)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:  # Ray sets its own, and Ctrl-C is ours
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


def _stay_here(undo: ExitStack, ray: Any) -> None:
    """A Ray of this machine's own listens on the loopback address alone, and has a token and a session of its own.

    Ray listens so by itself on systems where it knows no clusters; the switch for that works on others too. In a
    session of its own it gets no signal that is sent to all of the program at once: a round can be finished.
    """
    constants = ray._private.ray_constants
    undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
    constants.ENABLE_RAY_CLUSTER = False
    if ray._private.utils.detect_fate_sharing_support():  # else Ray ends what is left behind by its process group
        services = ray._private.services
        undo.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
    for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_AUTH_TOKEN", _token())):
        if name not in os.environ and not (name == "RAY_AUTH_TOKEN" and "RAY_AUTH_TOKEN_PATH" in os.environ):
            os.environ[name] = value
            undo.callback(os.environ.pop, name, None)


@cache
def _token() -> str:
    """Of this process's own Rays: Ray reads it once."""
    return secrets.token_hex(32)
