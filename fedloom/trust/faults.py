"""Faults on purpose: clients that are silent, crash, raise, send NaN or are slow; drawn by key, like all else."""

from dataclasses import dataclass, replace
from time import sleep
from typing import Literal

import torch
from pydantic import Field, model_validator

from fedloom.core.checking import Section, refusal
from fedloom.core.failures import Failure, InjectedError
from fedloom.core.job import Job, Result, Work
from fedloom.core.message import Message
from fedloom.core.rng import numpy_generator
from fedloom.core.workspace import Workspace

Fault = Literal["", "drop", "crash", "raises", "nan"]


class Faults(Section):
    """The `faults` section: with which probability a client fails in a round. The same clients on every engine."""

    drop: float = Field(0, ge=0, le=1, description="the client does not answer")
    crash: float = Field(0, ge=0, le=1, description="its worker process dies (only counted so, where there is none)")
    raises: float = Field(0, ge=0, le=1, description="it raises an error")
    nan: float = Field(0, ge=0, le=1, description="it sends NaN")
    slow: float = Field(0, ge=0, le=1, description="it takes slow_seconds longer, whatever else happens to it")
    slow_seconds: float = Field(1, ge=0, description="how much longer a slow client takes")

    @model_validator(mode="after")
    def _possible(self) -> "Faults":
        total = self.drop + self.crash + self.raises + self.nan
        if total > 1:
            raise refusal(f"faults = {total:g} in all: drop, crash, raises and nan exclude each other; 1 is the most")
        return self

    @property
    def any(self) -> bool:
        """Whether anything can happen at all."""
        return bool(self.drop or self.crash or self.raises or self.nan or self.slow)

    def draw(self, seed: int, round: int, client: int, attempt: int = 0) -> tuple[Fault, float]:
        """The fault of a client in a round (drawn again when the round is retried), and its delay in seconds."""
        if not self.any:
            return "", 0.0
        again = (attempt,) if attempt else ()
        chance, late = numpy_generator(seed, round, client, "fault", *again).random(2)
        delay = self.slow_seconds if late < self.slow else 0.0
        kinds: tuple[Fault, ...] = ("drop", "crash", "raises", "nan")
        for kind in kinds:
            chance -= getattr(self, kind)
            if chance < 0:
                return kind, delay
        return "", delay


@dataclass(frozen=True)
class FaultInjector:
    """Wraps a client's work (`Setup.intercept`): what the faults' section draws for the client happens to it."""

    faults: Faults
    seed: int

    def __call__(self, work: Work, workspace: Workspace, job: Job) -> Result:
        """The client's result, or the failure that was injected."""
        if job.kind != "update":
            return work(workspace, job)
        fault, delay = self.faults.draw(self.seed, job.round, job.client, job.attempt)
        if (failure := inject_fault(fault, delay)) is not None:
            return Result(job.client, error=failure)
        result = work(workspace, job)
        return replace(result, message=corrupt(result.message)) if fault == "nan" and result.message else result


def inject_fault(fault: Fault, delay: float) -> Failure | None:
    """What happens before a client works. A worker process ends itself where this reports a crash."""
    if delay:
        sleep(delay)
    if fault == "drop":
        return Failure("dropped", "it does not answer (faults.drop)", injected=True)
    if fault == "crash":
        return Failure("died", "it crashed (faults.crash)", injected=True)
    if fault == "raises":
        raise InjectedError("faults.raises")
    return None


def corrupt(message: Message) -> Message:
    """The message with NaN in place of every number."""
    tensors = {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in message.items()}
    return Message(tensors, client=message.client, samples=message.samples)
