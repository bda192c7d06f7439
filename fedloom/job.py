"""A job in, a result out: the whole of what an engine asks a lane to do. Every engine calls `attempt`."""

from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.envelope import MessageError
from fedloom.evaluation.scores import Scores, answers
from fedloom.failing.failures import Failure
from fedloom.failing.faults import Fault, befall, spoilt
from fedloom.lane import Lane
from fedloom.message import Message, pack, unpack
from fedloom.parts import State, snapshot
from fedloom.worker import Worker

Kind = Literal["update", "evaluate", "global", "generalise"]


@dataclass(frozen=True)
class Job:
    """What a lane is asked to do.

    `update` a client; `evaluate` its personal model; score the `global` model on some clients' test samples; or
    `generalise`: let the method complete the global representation with these clients' data, then score it on theirs.
    """

    kind: Kind
    round: int
    message: Message
    client: int = -1
    memory: State | None = None
    clients: tuple[int, ...] = ()  # whose test samples (and training samples) a global job is about
    keep_model: bool = False  # whether evaluate and generalise return what was changed in the model
    fault: Fault = ""  # what the recipe lets happen to this client
    delay: float = 0.0  # seconds by which it lets the client be late

    def to_bytes(self, with_message: bool = True) -> bytes:
        """For a worker elsewhere; a message that it has already need not travel again."""
        header = {
            "kind": self.kind, "round": self.round, "client": self.client, "clients": self.clients,
            "keep_model": self.keep_model, "new": self.memory is None, "message": with_message,
            "fault": self.fault, "delay": self.delay,
        }  # fmt: skip
        return pack(
            _prefixed("message", self.message if with_message else {}) | _prefixed("memory", self.memory or {}),
            header,
        )

    @classmethod
    def from_bytes(cls, data: bytes, known: Message | None = None) -> "Job":
        """The inverse; `known` is the message that was not sent again."""
        tensors, header = unpack(data)
        message = Message(_under("message", tensors)) if header.pop("message") else known
        assert message is not None
        memory = None if header.pop("new") else _under("memory", tensors)
        return cls(message=message, memory=memory, **header | {"clients": tuple(header["clients"])})


@dataclass
class Result:
    """What comes back from a job; with an `error`, nothing else does."""

    client: int
    message: Message | None = None
    memory: State | None = None
    personal: State | None = None
    scores: list[Scores] = field(default_factory=list)
    loss: Tensor | float | None = None  # a tensor until somebody asks: on a GPU that means waiting
    seconds: float = 0.0
    error: Failure | None = None

    def to_bytes(self) -> bytes:
        """For the way back from a worker elsewhere."""
        sent = None if self.message is None else self.message.tensors
        groups = {"message": sent, "memory": self.memory, "personal": self.personal}
        tensors: State = {}
        for name, state in groups.items():
            tensors |= _prefixed(name, state or {})
        header: dict[str, Any] = {
            "has": [name for name, state in groups.items() if state is not None],
            "samples": 0 if self.message is None else self.message.samples,
            "client": self.client,
            "loss": None if self.loss is None else float(self.loss),
            "scores": [asdict(s) for s in self.scores],
            "seconds": self.seconds,
            "error": None if self.error is None else asdict(replace(self.error, cause=None)),
        }
        return pack(tensors, header)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Result":
        """The inverse."""
        tensors, header = unpack(data)
        try:
            states = {name: _under(name, tensors) for name in header["has"]}
            message = None
            if "message" in states:
                message = Message(states["message"], client=header["client"], samples=header["samples"])
            return cls(
                client=header["client"],
                message=message,
                memory=states.get("memory"),
                personal=states.get("personal"),
                scores=[Scores(**s) for s in header["scores"]],
                loss=header["loss"],
                seconds=header["seconds"],
                error=None if header["error"] is None else Failure(**header["error"]),
            )
        except (KeyError, TypeError) as error:
            raise MessageError(f"the message is refused: its header is no result's ({error})") from None


def attempt(lane: Lane, job: Job) -> Result:
    """As `perform`, but what a client raises becomes the result's error. Every engine reports failures so.

    A GPU out of memory is not the client's doing: that is the engine's to mend, and raised.
    """
    try:
        if failure := befall(job.fault, job.delay):
            return Result(job.client, error=failure)
        return perform(lane, job)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Result(job.client, error=Failure.of(error))


def perform(lane: Lane, job: Job) -> Result:
    """Does a job in this lane. The result depends on the job and the setup alone."""
    start = perf_counter()
    try:
        if job.kind in WIRED and lane.setup.wire.down is not None:
            job = replace(job, message=lane.setup.wire.at_client(job.message, lane.initial))
        result = WORK[job.kind](lane, job)
    except Exception as error:
        error.add_note(f"(in a job of client {job.client}: {job.kind}, round {job.round})")
        raise
    result.seconds = perf_counter() - start
    return result


def _client(lane: Lane, job: Job, purpose: str, memory: State | None) -> Client:
    """Loads a client into the lane; one without memory is prepared first."""
    samples = lane.setup.task.samples(job.client)
    lane.load(job.message, memory)
    new = memory is None
    if new:
        for network in lane.networks:
            lane.setup.task.objective.begin(network)
        lane.setup.method.prepare(Client(lane, who=job.client, round=0, job="prepare", samples=samples, first=True))
    kept = {name: tensor for name, tensor in (memory or {}).items() if name.startswith("optim.")}
    return Client(lane, who=job.client, round=job.round, job=purpose, samples=samples, first=new, kept=kept)


def _update(lane: Lane, job: Job) -> Result:
    method = lane.setup.method
    client = _client(lane, job, "update", job.memory)
    method.update(client)
    message = Message(lane.outgoing(), client=job.client, samples=client.size)
    if job.fault == "nan":
        message = spoilt(message)
    message, left = lane.setup.wire.to_server(message, job.message, job.memory or {})
    return Result(client=job.client, message=message, memory=_memory(client) | left, loss=client.last_loss)


def _memory(client: Client) -> State:
    return client._lane.kept() | client._kept


def _evaluate(lane: Lane, job: Job) -> Result:
    """The personal model. A client that keeps something but never took part gets it from one transient update."""
    method, task = lane.setup.method, lane.setup.task
    memory = job.memory
    if memory is None and method.personal_parts:
        newcomer = _client(lane, job, "newcomer", None)
        method.update(newcomer)
        memory = _memory(newcomer)
    client = _client(lane, job, "personalise", {} if memory is None else memory)
    method.personalise(client)
    personal = _changed(lane, job.message) if job.keep_model else None
    lane.parts.eval()
    scored = answers(lane, task.federation.test[job.client], lambda x: method.predict(client, x))
    return Result(client=job.client, personal=personal, scores=[scored.of(job.client)])


def _changed(lane: Lane, message: Message) -> State:
    """What differs from initial values ← message."""
    base = {name: message.get(name, value) for name, value in lane.initial.items()}
    now = snapshot(lane.parts)
    return {name: value.cpu() for name, value in now.items() if not torch.equal(value, base[name].to(value))}


def _score_global(lane: Lane, job: Job) -> Result:
    task, method = lane.setup.task, lane.setup.method
    lane.load(job.message, None)
    lane.parts.eval()
    holder = Worker(lane, who=-1, round=job.round, job="global", samples=np.empty(0, np.int64))
    tests = [task.federation.test[c] for c in job.clients]
    scored = answers(lane, np.concatenate(tests), lambda x: method.predict_global(holder, x))
    cuts = np.cumsum([len(test) for test in tests])[:-1]
    return Result(client=-1, scores=[part.of(c) for c, part in zip(job.clients, scored.split(cuts), strict=True)])


def _generalise(lane: Lane, job: Job) -> Result:
    task, method = lane.setup.task, lane.setup.method
    lane.load(job.message, None)
    samples = np.concatenate([task.samples(c) for c in job.clients])
    everybody = Client(lane, who=job.client, round=job.round, job="generalise", samples=samples, first=False)
    method.generalise(everybody)
    personal = _changed(lane, job.message) if job.keep_model else None
    lane.parts.eval()
    tests = {id(task.federation.test[c]): task.federation.test[c] for c in job.clients}
    scored = answers(lane, np.concatenate(list(tests.values())), lambda x: method.predict_global(everybody, x))
    return Result(client=job.client, personal=personal, scores=[scored.of(job.client)])


WIRED = ("update", "evaluate")
"""Jobs whose message is what a client gets from the server; a global one is about the server's own state."""
WORK = {"update": _update, "evaluate": _evaluate, "global": _score_global, "generalise": _generalise}


def _prefixed(prefix: str, state: Any) -> State:
    return {f"{prefix}/{name}": tensor for name, tensor in state.items()}


def _under(prefix: str, tensors: State) -> State:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(prefix + "/")}
