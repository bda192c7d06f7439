"""Fault injection, for studies: clients that do not respond, crash, raise, send NaN or are slow, and lost messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from time import sleep
from typing import Literal

import torch
from pydantic import Field, model_validator

from fedloom.core.checking import Section, refusal
from fedloom.core.execution import Work
from fedloom.core.failures import Failure, InjectedError
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message
from fedloom.core.rng import numpy_generator
from fedloom.core.workspace import Workspace

Fault = Literal["", "drop", "crash", "raises", "nan", "lost"]
KINDS: tuple[Fault, ...] = ("drop", "crash", "raises", "nan", "lost")
"""Faults of which a client has at most one per round, in the order in which they are drawn."""


class Faults(Section):
    """The recipe section `faults`: probabilities that a client fails in a round; the same clients on every engine."""

    drop: float = Field(0, ge=0, le=1, description="probability that a client does not respond")
    crash: float = Field(
        0,
        ge=0,
        le=1,
        description="probability that a client's worker process dies (on engines without workers: is recorded as dead)",
    )
    raises: float = Field(0, ge=0, le=1, description="probability that a client raises an exception")
    nan: float = Field(0, ge=0, le=1, description="probability that a client sends NaN")
    lost: float = Field(
        0, ge=0, le=1, description="probability that a client trains and keeps the result, but its message is lost"
    )
    slow: float = Field(
        0,
        ge=0,
        le=1,
        description="probability that a client takes slow_seconds longer; independent of the other faults",
    )
    slow_seconds: float = Field(1, ge=0, description="additional seconds that a slow client takes")

    @model_validator(mode="after")
    def _possible(self) -> "Faults":
        total = sum(getattr(self, kind) for kind in KINDS)
        if total > 1:
            raise refusal(
                f"faults = {total:g} in total: {', '.join(KINDS[:-1])} and {KINDS[-1]} exclude each other; their sum "
                "must be at most 1"
            )
        return self

    @property
    def any(self) -> bool:
        """Whether any fault has a probability above 0."""
        return bool(self.slow) or any(getattr(self, kind) for kind in KINDS)

    def draw(self, seed: int, round: int, client: int, attempt: int = 0) -> tuple[Fault, float]:
        """Draw a client's fault and its delay in seconds for one attempt at a round."""
        if not self.any:
            return "", 0.0
        again = (attempt,) if attempt else ()
        chance, late = numpy_generator(seed, round, client, "fault", *again).random(2)
        delay = self.slow_seconds if late < self.slow else 0.0
        for kind in KINDS:
            chance -= getattr(self, kind)
            if chance < 0:
                return kind, delay
        return "", delay


@dataclass(frozen=True)
class FaultInjector:
    """Wrapper around a client's work (`Setup.intercept`) that injects the faults drawn for the client.

    Lost messages are not its task, but that of `LoseMessages`.
    """

    faults: Faults
    seed: int

    def __call__(self, work: Work, workspace: Workspace, job: Job) -> Result:
        """Return the client's result, or the injected failure."""
        if job.kind != "update":
            return work(workspace, job)
        fault, delay = self.faults.draw(self.seed, job.round, job.client, job.attempt)
        if (failure := inject_fault(fault, delay)) is not None:
            return Result(job.client, error=failure)
        result = work(workspace, job)
        return replace(result, message=corrupt(result.message)) if fault == "nan" and result.message else result


class LoseMessages:
    """Middleware that discards the messages drawn for `faults.lost`, and passes on what their clients keep."""

    def __init__(self, engine: Runner, faults: Faults, seed: int):
        self._engine, self._faults, self._seed = engine, faults, seed

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield the engine's results; one whose message is lost is a failure with the client's memory."""
        lost: set[int] = set()
        failure = Failure("dropped", "its message was lost (faults.lost)", injected=True)
        for result in self._engine.run(self._draw(jobs, lost)):
            if result.error is None and result.client in lost:
                result = Result(result.client, memory=result.memory, error=failure)
            yield result

    def _draw(self, jobs: Iterable[Job], lost: set[int]) -> Iterator[Job]:
        for job in jobs:
            if self._faults.draw(self._seed, job.round, job.client, job.attempt)[0] == "lost":
                lost.add(job.client)
            yield job


def inject_fault(fault: Fault, delay: float) -> Failure | None:
    """Apply a fault and a delay before a client works.

    Returns:
        The failure to report instead of a result, or None. A worker process exits if the failure is a crash.

    Raises:
        InjectedError: The fault is `raises`.
    """
    if delay:
        sleep(delay)
    if fault == "drop":
        return Failure("dropped", "no response (faults.drop)", injected=True)
    if fault == "crash":
        return Failure("died", "it crashed (faults.crash)", injected=True)
    if fault == "raises":
        raise InjectedError("faults.raises")
    return None


def corrupt(message: Message) -> Message:
    """Return a copy of the message with every float replaced by NaN."""
    tensors = {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in message.items()}
    return Message(tensors, client=message.client, samples=message.samples)
