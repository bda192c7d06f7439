"""Simulated hostile clients, for studies: some clients falsify the updates that they send."""

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
"""All kinds of attack, with the default of `attack.strength` for each."""


class AttackSettings(Section):
    """The recipe section `attack`: which share of the clients is hostile, and how they falsify their updates."""

    kind: Literal["signflip", "scale", "noise"] = Field(
        "signflip",
        description="falsified message, with strength s: received − s·update (signflip), received + s·update (scale), "
        "or the honest message plus N(0, s²) (noise)",
    )
    share: float = Field(
        0.2, gt=0, lt=1, description="share of the training clients that are hostile; the same clients in every round"
    )
    strength: float | None = Field(
        None, gt=0, description="strength s of the attack; default: 1 (signflip), 10 (scale), 1 (noise)"
    )

    @property
    def s(self) -> float:
        """Strength of the attack: `strength`, or the default of the kind."""
        return STRENGTH[self.kind] if self.strength is None else self.strength


class Attack:
    """A choice of hostile clients, and the falsification of their messages.

    The hostile clients are drawn once, by the seed. They train honestly, and their memory stays honest; only their
    messages are falsified. All float tensors change, except row weights (`uncounted`). An update is the sent tensor
    minus the received tensor, or minus zero if the client did not receive a tensor of that name.

    Args:
        settings: The recipe section `attack`.
        clients: Ids of all training clients.
        seed: The recipe's seed.
        uncounted: Names of tensors that stay unchanged.

    Raises:
        UserError: `share` makes none or all of the clients hostile.

    Example:
        >>> attack = Attack(AttackSettings(kind="signflip", share=0.2), clients=range(10), seed=0)
        >>> len(attack.hostile)
        2
    """

    def __init__(self, settings: AttackSettings, clients: Iterable[int], seed: int, *, uncounted: Iterable[str] = ()):
        clients = list(clients)
        self.settings, self.seed, self.uncounted = settings, seed, frozenset(uncounted)
        count = round(settings.share * len(clients))
        if not 0 < count < len(clients):
            raise UserError(
                f"attack.share = {settings.share:g}: makes {count} of {len(clients)} clients hostile; choose a share "
                "that gives at least one hostile and one honest client"
            )
        chosen = numpy_generator(seed, "attack").choice(len(clients), count, replace=False)
        self.hostile = frozenset(clients[i] for i in chosen)

    def falsified(self, message: Message, received: Message, round: int) -> Message:
        """Return the falsified message that a hostile client sends.

        Args:
            message: The client's honest message.
            received: The server's message to this client.
            round: Number of the round; the noise is drawn by it.
        """
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
    """Middleware around an engine that falsifies the messages of hostile clients."""

    def __init__(self, engine: Runner, attack: Attack):
        self._engine, self._attack = engine, attack

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield the results of jobs, with falsified messages for hostile clients."""
        pending: dict[int, Job] = {}
        for result in self._engine.run(self._remember(jobs, pending)):
            job = pending.pop(result.client, None)
            if job is not None and result.message is not None:
                result = replace(result, message=self._attack.falsified(result.message, job.message, job.round))
            yield result

    def _remember(self, jobs: Iterable[Job], pending: dict[int, Job]) -> Iterator[Job]:
        """Yield jobs unchanged and store those of hostile clients in `pending`, until their results arrive."""
        for job in jobs:
            if job.client in self._attack.hostile:
                pending[job.client] = job
            yield job
