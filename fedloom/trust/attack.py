"""Simulated hostile clients, for studies: some clients falsify what they send, or the data that they train on.

Data attacks (`labelflip`, `backdoor`) are in `poison.py`. Attacks on messages are here: `signflip`, `scale` and `noise`
change a client's honest message. With `alie` and `ipm` the hostile clients collude and know the honest messages of the
round, so that all messages of a round are in memory at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.checking import Section, refusal
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message
from fedloom.core.rng import key, numpy_generator
from fedloom.core.state import State, under
from fedloom.core.task import Task
from fedloom.core.trigger import Trigger
from fedloom.trust.poison import Poison, make_trigger

Kind = Literal["signflip", "scale", "noise", "alie", "ipm", "labelflip", "backdoor"]
STRENGTH: dict[Kind, float] = {"signflip": 1.0, "scale": 10.0, "noise": 1.0, "ipm": 0.5}
"""Default of `attack.strength`; that of `alie` depends on the round, see `alie_strength`."""
PORTION: dict[Kind, float] = {"labelflip": 1.0, "backdoor": 0.5}
"""Data attacks, with the default of `attack.portion`."""
COLLUDING: tuple[Kind, ...] = ("alie", "ipm")
"""Attacks whose messages are computed from the honest messages of the round."""
USERS: dict[str, tuple[Kind, ...]] = {
    "strength": (*STRENGTH, "alie"), "portion": tuple(PORTION), "target": ("backdoor",), "patch": ("backdoor",),
}  # fmt: skip
"""Fields that only some attacks use."""
MOST = 3.0
"""Largest default strength of `alie`: beyond it, the attackers need no honest client for a majority."""


class AttackSettings(Section):
    """The recipe section `attack`: which share of the clients is hostile, and what they falsify."""

    kind: Kind = Field(
        "signflip",
        description="falsified message, with strength s: received − s·update (signflip), received + s·update (scale), "
        "the honest message plus N(0, s²) (noise), mean − s·std of the honest messages (alie), received − s·mean of "
        "the honest updates (ipm); or falsified training data: class C − 1 − y (labelflip), a bright square and the "
        "class `target` (backdoor)",
    )
    share: float = Field(
        0.2, gt=0, lt=1, description="share of the training clients that are hostile; the same clients in every round"
    )
    strength: float | None = Field(
        None,
        gt=0,
        description="strength s of the attack; default: 1 (signflip), 10 (scale), 1 (noise), 0.5 (ipm), the largest "
        "that hides among the clients of the round (alie)",
    )
    portion: float | None = Field(
        None,
        gt=0,
        le=1,
        description="labelflip and backdoor: share of a hostile client's training samples that are falsified; default: "
        "1 (labelflip), 0.5 (backdoor)",
    )
    target: int | None = Field(
        None, ge=0, description="backdoor: class that images with the square are to be predicted as; default: 0"
    )
    patch: int | None = Field(None, ge=1, description="backdoor: side of the square in pixels; default: 2")

    @model_validator(mode="after")
    def _used(self) -> "AttackSettings":
        for field, users in USERS.items():
            value = getattr(self, field)
            if value is not None and self.kind not in users:
                raise refusal(
                    f"attack.{field} = {value:g}: the attack {self.kind} does not use it (only: {', '.join(users)}); "
                    "remove it"
                )
        return self

    @property
    def falsifies_messages(self) -> bool:
        """Whether messages are falsified, and not training data."""
        return self.kind not in PORTION


class Attack:
    """A choice of hostile clients, and what they falsify.

    The hostile clients are drawn once, by the seed. Under an attack on messages they train honestly, and their memory
    stays honest. All float tensors of their messages change, except row weights (the values of `by`). An update is the
    sent tensor minus the received tensor, or minus zero if the client did not receive a tensor of that name.

    Args:
        settings: The recipe section `attack`.
        clients: Ids of all training clients.
        seed: The recipe's seed.
        by: Row weights by part, as in `Method.by`; the weights stay unchanged.

    Raises:
        UserError: `share` makes none or all of the clients hostile.

    Example:
        >>> attack = Attack(AttackSettings(kind="signflip", share=0.2), clients=range(10), seed=0)
        >>> len(attack.hostile)
        2
    """

    def __init__(
        self, settings: AttackSettings, clients: Iterable[int], seed: int, *, by: Mapping[str, str] | None = None
    ):
        clients = list(clients)
        self.settings, self.seed, self.by = settings, seed, dict(by or {})
        count = round(settings.share * len(clients))
        if not 0 < count < len(clients):
            raise UserError(
                f"attack.share = {settings.share:g}: makes {count} of {len(clients)} clients hostile; choose a share "
                "that gives at least one hostile and one honest client"
            )
        chosen = numpy_generator(seed, "attack").choice(len(clients), count, replace=False)
        self.hostile = frozenset(clients[i] for i in chosen)

    def trigger(self, task: Task) -> Trigger | None:
        """Return the trigger of a backdoor; None for other attacks."""
        settings = self.settings
        return make_trigger(task, settings.target or 0, settings.patch or 2) if settings.kind == "backdoor" else None

    def poisoned(self, task: Task) -> Task:
        """Return the task with hostile clients' falsified training data; an attack on messages does not change it."""
        settings = self.settings
        if settings.falsifies_messages:
            return task
        portion = PORTION[settings.kind] if settings.portion is None else settings.portion
        return Poison(portion, self.seed, self.trigger(task)).applied(task, self.hostile)

    def falsified(self, message: Message, received: Message, round: int) -> Message:
        """Return the message that a hostile client sends under `signflip`, `scale` or `noise`.

        Args:
            message: The client's honest message.
            received: The server's message to this client.
            round: Number of the round; the noise is drawn by it.
        """
        generator = torch.Generator().manual_seed(key(self.seed, round, message.client, "attack"))
        changed = {n: self._changed(value, received.get(n), generator) for n, value in self._floats(message)}
        return _with(message, changed)

    def _changed(self, value: Tensor, start: Tensor | None, generator: torch.Generator) -> Tensor:
        kind = self.settings.kind
        s = STRENGTH[kind] if self.settings.strength is None else self.settings.strength
        if kind == "noise":
            return value + s * torch.randn(value.shape, generator=generator).to(value)
        start = torch.zeros_like(value) if start is None else start.to(value)
        return start + (value - start) * (-s if kind == "signflip" else s)

    def colluding(
        self, hostile: Mapping[int, Message], honest: Mapping[int, Message], received: Mapping[int, Message]
    ) -> dict[int, Message]:
        """Return the messages that all hostile clients of a round send under `alie` or `ipm`.

        A row with weights (`by`) is falsified by the messages that hold it, and left unchanged if none does.

        Args:
            hostile: The messages that hostile clients would send, by client.
            honest: The messages of honest clients.
            received: The server's message to each client.
        """
        if not honest:
            return dict(hostile)
        s = self.settings.strength
        if s is None:
            n, m = len(hostile) + len(honest), len(hostile)
            s = alie_strength(n, m) if self.settings.kind == "alie" else STRENGTH[self.settings.kind]
        crafted: dict[int, State] = {client: {} for client in hostile}
        for name, like in self._floats(next(iter(honest.values()))):
            starts = {c: _start(received[c], name, like) for c in (*honest, *hostile)}
            values = torch.stack([message[name].double() for message in honest.values()])
            if self.settings.kind == "ipm":
                values = values - torch.stack([starts[client] for client in honest])
            mean, std, held = self._moments(name, values, honest)
            for client, message in hostile.items():
                new = mean - s * std if self.settings.kind == "alie" else starts[client] - s * mean
                crafted[client][name] = torch.where(held, new, message[name].double()).to(message[name].dtype)
        return {client: _with(message, crafted[client]) for client, message in hostile.items()}

    def _moments(self, name: str, values: Tensor, honest: Mapping[int, Message]) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and population standard deviation over clients, and where any of them holds the row."""
        weights = torch.ones(len(values), dtype=torch.float64)
        if (rows := next((w for part, w in self.by.items() if under(name, (part,))), None)) is not None:
            weights = torch.stack([(message[rows] > 0).double() for message in honest.values()])
        weights = weights.reshape(*weights.shape, *[1] * (values.dim() - weights.dim())).to(values.device)
        total = weights.sum(0)
        mean = (weights * values).sum(0) / total.clamp_min(1)
        std = ((weights * (values - mean).square()).sum(0) / total.clamp_min(1)).sqrt()
        return mean, std, (total > 0).expand_as(mean)

    def _floats(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a message that are falsified."""
        for name, value in message.items():
            if value.is_floating_point() and name not in self.by.values():
                yield name, value


def alie_strength(clients: int, hostile: int) -> float:
    """Return z_max of "A Little Is Enough" (Baruch et al., 2019, Algorithm 3), between 0 and `MOST`.

    s = ⌊n/2 + 1⌋ − m honest clients must be further from the mean than the m attackers, so that these and the
    attackers are a majority: z_max = Φ⁻¹((n − m − s) / (n − m)).
    """
    honest, needed = clients - hostile, clients // 2 + 1 - hostile
    normal = NormalDist()
    return normal.inv_cdf(min(max((honest - needed) / honest, 0.5), normal.cdf(MOST)))


def _start(received: Message, name: str, like: Tensor) -> Tensor:
    value = received.get(name)
    return torch.zeros_like(like, dtype=torch.float64) if value is None else value.to(like.device).double()


def _with(message: Message, changed: State) -> Message:
    return Message(dict(message.items()) | changed, client=message.client, samples=message.samples)


class FalsifyMessages:
    """Middleware around an engine that falsifies the messages of hostile clients."""

    def __init__(self, engine: Runner, attack: Attack):
        self._engine, self._attack = engine, attack

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield the results of jobs, with falsified messages for hostile clients."""
        if self._attack.settings.kind in COLLUDING:
            yield from self._run_colluding(jobs)
            return
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

    def _run_colluding(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Wait for all results, because hostile messages depend on all honest ones, and yield them in their order."""
        received: dict[int, Message] = {}

        def remembered() -> Iterator[Job]:
            for job in jobs:
                received[job.client] = job.message
                yield job

        results = list(self._engine.run(remembered()))
        sent = {r.client: r.message for r in results if r.message is not None and r.message.not_finite() is None}
        hostile = {client: message for client, message in sent.items() if client in self._attack.hostile}
        honest = {client: message for client, message in sent.items() if client not in hostile}
        crafted = self._attack.colluding(hostile, honest, received)
        for result in results:
            yield replace(result, message=crafted[result.client]) if result.client in crafted else result
