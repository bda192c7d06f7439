"""Hostile clients, for study: some clients send something other than what they have learnt."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message
from fedloom.core.rng import key, numpy_generator
from fedloom.core.state import State

STRENGTH = {"signflip": 1.0, "scale": 10.0, "noise": 1.0}


class AttackSettings(Section):
    """Which clients are hostile, and what they do to what they send."""

    kind: Literal["signflip", "scale", "noise"] = Field(
        "signflip", description="send received − s·update, received + s·update, or the update plus N(0, s²)"
    )
    share: float = Field(0.2, gt=0, lt=1, description="share of the training clients that are hostile, in every round")
    strength: float | None = Field(None, gt=0, description="s; signflip 1, scale 10, noise 1 if not given")

    @property
    def s(self) -> float:
        """The strength that counts."""
        return STRENGTH[self.kind] if self.strength is None else self.strength


class Attack:
    """Which clients are hostile, and what they send.

    The hostile clients are drawn once, by the seed. They train honestly and keep what they keep; only what they send is
    falsified: every float but row weights (`uncounted`), as a change of their update, that is of what they send minus
    what they received (minus zero, where nothing of that name came down).
    """

    def __init__(self, settings: AttackSettings, clients: Iterable[int], seed: int, *, uncounted: Iterable[str] = ()):
        clients = list(clients)
        self.settings, self.seed, self.uncounted = settings, seed, frozenset(uncounted)
        count = round(settings.share * len(clients))
        if not 0 < count < len(clients):
            raise UserError(
                f"attack.share = {settings.share:g}: makes {count} of {len(clients)} clients hostile; "
                "there must be at least one, and one honest client"
            )
        chosen = numpy_generator(seed, "attack").choice(len(clients), count, replace=False)
        self.hostile = frozenset(clients[i] for i in chosen)

    def falsified(self, message: Message, received: Message, round: int) -> Message:
        """What a hostile client sends instead of a message."""
        generator = torch.Generator().manual_seed(key(self.seed, round, message.client, "attack"))
        tensors: State = {
            name: self._changed(value, received.get(name), generator)
            if value.is_floating_point() and name not in self.uncounted
            else value
            for name, value in message.items()
        }
        return Message(tensors, client=message.client, samples=message.samples)

    def _changed(self, value: Tensor, start: Tensor | None, generator: torch.Generator) -> Tensor:
        s = self.settings.s
        if self.settings.kind == "noise":
            return value + s * torch.randn(value.shape, generator=generator).to(value)
        start = torch.zeros_like(value) if start is None else start.to(value)
        return start + (value - start) * (-s if self.settings.kind == "signflip" else s)


class FalsifyMessages:
    """Middleware around an engine: hostile clients' messages are falsified."""

    def __init__(self, engine: Runner, attack: Attack):
        self._engine, self._attack = engine, attack

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results, those of hostile clients falsified."""
        given: dict[int, Job] = {}
        for result in self._engine.run(self._noting(jobs, given)):
            job = given.pop(result.client, None)
            if job is not None and result.message is not None:
                result = replace(result, message=self._attack.falsified(result.message, job.message, job.round))
            yield result

    def _noting(self, jobs: Iterable[Job], given: dict[int, Job]) -> Iterator[Job]:
        """Jobs as they are; those of hostile clients are remembered until they answer."""
        for job in jobs:
            if job.client in self._attack.hostile:
                given[job.client] = job
            yield job
