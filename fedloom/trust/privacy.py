"""Client-level differential privacy, which replaces the weighted mean (DP-FedAvg: McMahan et al., 2018).

A round releases only the new shared state: old + (Σ_i clip(x_i − old) + N(0, (noise·clip)²)) / m. A client's update is
the vector of all its averaged float tensors, batch-norm statistics included. It is clipped to the norm `clip`, and all
clients have equal weight. m is the planned number of clients per round, known in advance. A client that fails, or sends
numbers that are not finite, counts as an update of zero, so that the bound also holds for this client.

Nothing else that a client sends may reach the server's state. Only the private average can read messages
(`RestrictedMessages`), and integer buffers do not change. A method that reads messages directly, adds up (`sums`) or
weighs by rows (`by`) is refused. docs/explanation/trust.md states what the guarantee covers and what it does not cover.
"""

import os
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.rng import key
from fedloom.core.server import By, Server
from fedloom.core.state import State, under
from fedloom.trust.access import RestrictedMessages, use_of_messages
from fedloom.trust.centres import clip_factor, joint_norm


class PrivacySettings(Section):
    """The recipe section `privacy`: client-level differential privacy of the released models."""

    clip: float = Field(
        1.0, gt=0, description="maximum L2 norm of a client's whole update; larger ones are scaled down"
    )
    noise: float = Field(
        1.0,
        gt=0,
        description="noise multiplier: standard deviation of the noise on the sum of updates, divided by clip",
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="δ of (ε, δ)-differential privacy; choose it well below 1 / number of clients"
    )
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="how a round's clients are drawn. fixed: the same number in every round, ε for replacing one "
        "client; poisson: each client independently with probability training.fraction, ε for adding or removing one "
        "client",
    )


class PrivateAverage:
    """The noisy uniform mean of clipped updates, computed message by message in constant memory."""

    def __init__(self, settings: PrivacySettings, method: Method, participants: float, normals: "Normals"):
        self.settings, self.method, self.participants, self._normals = settings, method, participants, normals
        self.refusal = f"privacy: method.name = '{method.name}' {_READS}; {_REMEDY}"
        if reason := uncovered(method):
            raise UserError(f"privacy: method.name = '{method.name}' {reason}; {_REMEDY}")
        self._last = 0

    def average(
        self,
        server: Server,
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: "By",
        sums: tuple[str, ...],
    ) -> State:
        """Return the old state plus the noisy mean of clipped updates, once per round.

        Raises:
            UserError: The method reads messages directly, adds up or weighs messages, or averages twice in a round.
        """
        if not isinstance(messages, RestrictedMessages):
            raise UserError(self.refusal)
        if rows or sums:
            raise UserError(f"privacy: method.name = '{self.method.name}' {_ADDS_UP}; {_REMEDY}")
        if server.round == self._last:
            raise UserError(
                f"privacy: method.name = '{self.method.name}' averages twice in a round, but ε covers one; {_REMEDY}"
            )
        self._last = server.round
        old = {
            name: value
            for name, value in server.state.items()
            if value.is_floating_point() and under(name, self.method.up) and (paths is None or under(name, paths))
        }
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in old.items()}
        for message in messages.readable:
            updates = {name: message[name].double() - value.double() for name, value in old.items() if name in message}
            factor = clip_factor(joint_norm(list(updates.values())), self.settings.clip)
            if factor > 0:
                for name, update in updates.items():
                    total[name].add_(update, alpha=factor)
        normal = self._normals(server.round)
        return {name: self._released(name, old[name], total[name], normal) for name in old}

    def _released(self, name: str, old: Tensor, total: Tensor, normal: "Draw") -> Tensor:
        std = self.settings.noise * self.settings.clip
        noise = std * normal(total.shape).to(total.device)
        return repaired(name, old, old + (total + noise) / self.participants)


def repaired(name: str, old: Tensor, new: Tensor) -> Tensor:
    """Return a noisy tensor in the type of the old one, with the old values of variances that noise made negative.

    This is post-processing, which costs no privacy.
    """
    new = new.to(old.dtype)
    return torch.where(new > 0, new, old) if name.endswith("running_var") else new


Draw = Callable[[torch.Size], Tensor]
"""Draws float64 standard normals of a shape."""
Normals = Callable[[int], Draw]
"""Returns the source of noise for a round."""


def seeded_normals(seed: int) -> Normals:
    """Return noise derived from a seed: simulations are repeatable, but anyone who knows the seed can subtract it."""

    def of_round(round: int) -> Draw:
        generator = torch.Generator().manual_seed(key(seed, round, "privacy"))
        return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)

    return of_round


def system_normals(round: int) -> Draw:
    """Return noise from the operating system's random source, which is not repeatable; used in deployments.

    Box–Muller transform of 53-bit uniform numbers.
    """

    def draw(shape: torch.Size) -> Tensor:
        count = shape.numel()
        bits = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count) >> np.uint64(11)
        radius = np.sqrt(-2 * np.log((bits[0] + 1.0) * 2.0**-53))  # uniform on (0, 1]
        return torch.from_numpy(radius * np.cos(2 * np.pi * 2.0**-53 * bits[1])).reshape(shape)

    return draw


_REMEDY = "choose a method that supports privacy (see `fedloom methods`), or remove the privacy section"
_READS = "reads single clients' messages, which clipping and noise do not cover"
_ADDS_UP = (
    "adds up or weighs by values that clients send (class counts, control variates), which clipping does not cover"
)
_NOT_HELD = "sends parts that the server does not hold, so that there is no old value to which noisy updates are added"


def uncovered(method: Method) -> str | None:
    """Return why a method cannot be private, or None if a trial call of its `combine` shows no reason.

    The trial call may miss a reason. During the run, `combine` therefore gets messages that only the private average
    can read (`RestrictedMessages`).
    """
    if method.pooled:
        return "pools all data in one place, so that there are no clients to protect"
    if (use := use_of_messages(method)) in ("reads", "adds up"):
        return _READS if use == "reads" else _ADDS_UP
    return None if all(under(part, method.down) for part in method.up) else _NOT_HELD


class Spending:
    """Privacy budget ε as a function of the number of rounds, computed by dp-accounting's RDP accountant.

    `fixed`: m of N clients without replacement (Wang, Balle, Kasiviswanathan, 2019). Neighbouring datasets differ in
    one client's data, which changes the sum of clipped updates by up to 2·clip, so the accountant's noise multiplier is
    noise / 2. This bound can exceed the bound without sampling, which is also valid: the smaller one is used, order by
    order.

    `poisson`: each client with probability q (Mironov, Talwar, Zhang, 2019). Neighbouring datasets differ by adding or
    removing one client.

    Amplification by sampling needs participants that the adversary does not know. With `secure_aggregation` the noise
    protects against the server, too, which chooses them: then only the bound without sampling is used.
    """

    def __init__(
        self,
        settings: PrivacySettings,
        clients: int,
        fraction: float,
        participants: int,
        *,
        secure_aggregation: bool = False,
    ):
        try:
            import dp_accounting
            from absl import logging
            from dp_accounting import rdp
        except ImportError:
            raise UserError(
                "privacy: dp-accounting, which computes ε, is not installed: pip install 'fedloom[privacy]'"
            ) from None
        self._delta, self._epsilon = settings.delta, rdp.compute_epsilon
        exchanged = dp_accounting.NeighboringRelation.REPLACE_ONE
        if settings.sampling == "fixed":
            whole = dp_accounting.GaussianDpEvent(settings.noise / 2)
            events = [whole]
            if not secure_aggregation:
                events.append(dp_accounting.SampledWithoutReplacementDpEvent(clients, participants, whole))
            accountants = [rdp.RdpAccountant(neighboring_relation=exchanged) for _ in events]
        else:
            events = [dp_accounting.PoissonSampledDpEvent(fraction, dp_accounting.GaussianDpEvent(settings.noise))]
            accountants = [rdp.RdpAccountant()]
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)  # hides warnings about omitted RDP orders, which users cannot act on
        try:
            for accountant, event in zip(accountants, events, strict=True):
                accountant.compose(event)
        finally:
            logging.set_verbosity(verbosity)
        self._orders = accountants[0].orders
        self._round = np.minimum.reduce([accountant.rdp for accountant in accountants])

    def epsilon(self, rounds: int) -> float:
        """Return ε of all releases up to this number of rounds; the Rényi divergences of rounds add up."""
        return float(self._epsilon(self._orders, rounds * self._round, self._delta)[0])
