"""Faults on purpose: clients that are silent, crash, raise, send NaN or are slow; drawn by key, like all else."""

from time import sleep
from typing import Literal

import torch
from pydantic import Field, model_validator

from fedloom.checking import Section, refusal
from fedloom.failing.failures import Failure, InjectedError
from fedloom.message import Message
from fedloom.randomness import numpy_generator

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

    def draw(self, seed: int, round: int, client: int, attempt: int = 0) -> tuple[Fault, float]:
        """What befalls a client in a round (in a retried one it is drawn anew), and by how many seconds it is late."""
        if not (self.drop or self.crash or self.raises or self.nan or self.slow):
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


def befall(fault: Fault, delay: float) -> Failure | None:
    """What happens before a client works. A crash is only told here: a worker process ends itself (see Processes)."""
    if delay:
        sleep(delay)
    if fault == "drop":
        return Failure("dropped", "it does not answer (faults.drop)", injected=True)
    if fault == "crash":
        return Failure("died", "it crashed (faults.crash)", injected=True)
    if fault == "raises":
        raise InjectedError("faults.raises")
    return None


def spoilt(message: Message) -> Message:
    """The message with NaN in place of every number."""
    tensors = {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in message.items()}
    return Message(tensors, client=message.client, samples=message.samples)
