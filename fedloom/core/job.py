"""Jobs and results, which travel between engines, workspaces and organisations, and their serialised forms."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, NotRequired, Protocol

from pydantic import ConfigDict, Field, with_config
from torch import Tensor
from typing_extensions import TypedDict

from fedloom.core.errors import UserError
from fedloom.core.failures import Failure, FailureKind
from fedloom.core.message import Message, MessageError, pack, refuse_unless, unpack
from fedloom.core.reading import Count, Read, conforming
from fedloom.core.scores import Answers, Scores
from fedloom.core.state import State

JobKind = Literal["update", "evaluate", "global", "validate", "generalise"]
ENCODED = ("update", "evaluate")
"""Kinds of jobs whose message is encoded. The message of the others is the server's state, which is not transmitted."""
CLOSED = ConfigDict(extra="forbid")

ClientId = Annotated[int, Field(ge=-1, le=2**53)]
"""A client's number; -1 stands for all clients."""


@with_config(CLOSED)
class JobHeader(TypedDict):
    """The JSON header of a serialised job."""

    kind: JobKind
    round: Count
    client: ClientId
    clients: list[ClientId]
    keep_model: bool
    new: bool
    message: bool
    attempt: Count


@with_config(CLOSED)
class ScoresRow(TypedDict):
    """Serialised form of `Scores`."""

    client: ClientId
    right: list[Count]
    total: list[Count]
    loss: float | None
    metrics: NotRequired[dict[str, float | None]]


@with_config(CLOSED)
class FailureRow(TypedDict):
    """Serialised form of `Failure`."""

    kind: FailureKind
    why: str
    trace: str
    injected: bool
    mistake: bool
    reported: bool
    cause: None


@with_config(CLOSED)
class ResultHeader(TypedDict):
    """The JSON header of a serialised result."""

    has: list[Literal["message", "memory", "personal"]]
    samples: Annotated[int, Field(ge=-(2**53), le=2**53)]
    """Negative numbers are rejected later, when results are validated, with an error that names the client."""
    client: ClientId
    loss: float | None
    scores: list[ScoresRow]
    validation: NotRequired[list[ScoresRow]]
    seconds: float
    error: FailureRow | None


def _header(values: dict[str, Any], kind: type[Read]) -> Read:
    try:
        return conforming(values, kind, "the message", "it is refused")
    except UserError as error:
        raise MessageError(str(error)) from None


@dataclass(frozen=True)
class Job:
    """Work for one workspace.

    Kinds:

    - `update`: train a client.
    - `evaluate`: score a client's personal model on its test samples, and on its validation samples if it has any.
    - `global`: score the global model on the test samples of some clients.
    - `validate`: score the global model on the validation samples of some clients.
    - `generalise`: let the method complete the global representation with the data of some clients, then score it on
      their test samples, and on their validation samples if they have any. Newcomers among the clients contribute no
      data; their own scores follow those of the others together.
    """

    kind: JobKind
    round: int
    message: Message
    client: int = -1
    memory: State | None = None
    clients: tuple[int, ...] = ()  # clients whose samples a global, validate or generalise job uses
    keep_model: bool = False  # whether evaluate and generalise return the tensors that differ from the message
    attempt: int = 0  # number of earlier attempts at this round, with other clients

    def to_bytes(self, with_message: bool = True) -> bytes:
        """Serialise for a remote worker. `with_message=False` omits a message that the worker already has."""
        header = {
            "kind": self.kind, "round": self.round, "client": self.client, "clients": self.clients,
            "keep_model": self.keep_model, "new": self.memory is None, "message": with_message, "attempt": self.attempt,
        }  # fmt: skip
        return pack(
            _prefixed("message", self.message if with_message else {}) | _prefixed("memory", self.memory or {}), header
        )

    @classmethod
    def from_bytes(cls, data: bytes, known: Message | None = None) -> "Job":
        """Deserialise; `known` is the message if it was omitted.

        Raises:
            MessageError: The bytes are not a valid job.
        """
        tensors, values = unpack(data)
        header = _header(values, JobHeader)
        message = Message(_under("message", tensors)) if header["message"] else known
        refuse_unless(message is not None, "it is a job without a message")
        assert message is not None
        return cls(
            header["kind"],
            header["round"],
            message,
            header["client"],
            None if header["new"] else _under("memory", tensors),
            tuple(header["clients"]),
            header["keep_model"],
            header["attempt"],
        )


@dataclass
class Result:
    """Outcome of a job. If `error` is set, all other fields are empty, except `memory` if only the message was lost."""

    client: int
    message: Message | None = None
    memory: State | None = None
    personal: State | None = None
    scores: list[Scores] = field(default_factory=list)
    validation: list[Scores] = field(default_factory=list)
    """Scores on validation samples."""
    loss: Tensor | float | None = None  # a tensor until `read`, which waits for the GPU
    diverged: int | None = None
    """Number of the first training step, from 1, whose loss was not finite, in the client's last `fit`. It is not
    serialised: organisations of a deployment do not send it."""
    finite_steps: tuple[Tensor, int] | None = None
    """Two factors of the number of steps before it, from which `read` computes `diverged`."""
    seconds: float = 0.0
    error: Failure | None = None
    answers: Answers | None = None
    """Predictions from which `read` computes `scores`, which waits for the GPU."""
    validation_answers: Answers | None = None
    """Predictions from which `read` computes `validation`."""

    def read(self) -> "Result":
        """Wait for the device and convert scores and loss to numbers."""
        if self.answers is not None:
            self.scores, self.answers = self.answers.scores(), None
        if self.validation_answers is not None:
            self.validation, self.validation_answers = self.validation_answers.scores(), None
        if isinstance(self.loss, Tensor):
            self.loss = float(self.loss)
        if self.finite_steps is not None:
            if self.loss is not None and not math.isfinite(self.loss):
                share, samples = self.finite_steps
                self.diverged = round(float(share) * samples) + 1
            self.finite_steps = None
        return self

    def to_bytes(self) -> bytes:
        """Serialise, for transport from a remote worker."""
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
            "scores": [_row(s) for s in self.scores],
            "seconds": self.seconds,
            "error": None if self.error is None else asdict(replace(self.error, cause=None)),
        }
        if self.validation:
            header["validation"] = [_row(s) for s in self.validation]
        return pack(tensors, header)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Result":
        """Deserialise.

        Raises:
            MessageError: The bytes are not a valid result.
        """
        tensors, values = unpack(data)
        header = _header(values, ResultHeader)
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
            validation=[Scores(**s) for s in header.get("validation", ())],
            loss=header["loss"],
            seconds=header["seconds"],
            error=None if header["error"] is None else Failure(**header["error"]),
        )


def _row(scores: Scores) -> dict[str, Any]:
    """Return the serialised form of scores; without further figures it has no field for them."""
    return {name: value for name, value in asdict(scores).items() if name != "metrics" or value}


class Runner(Protocol):
    """An engine, or middleware around one."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run the jobs and yield their results in the order of the jobs. Failures are results, too."""
        ...


def _prefixed(prefix: str, state: Any) -> State:
    return {f"{prefix}/{name}": tensor for name, tensor in state.items()}


def _under(prefix: str, tensors: State) -> State:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(prefix + "/")}
