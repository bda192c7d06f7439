"""Client-level differential privacy in the place of the mean (DP-FedAvg: McMahan et al., 2018).

A round releases one thing, the new shared state: old + (Σ_i clip(x_i − old) + N(0, (noise·clip)²)) / m. The update of a
client is all its float tensors that are averaged, as one vector, batch-norm statistics included; it is clipped to the
norm `clip`, and every client counts alike. m is the number of clients that a round is meant to have, known beforehand:
one that fails, or sends numbers that are not finite, counts as an update of zero, so that the bound holds for it too.

Nothing else that a client sends may reach the server's state: messages are sealed, integer buffers stay as they were,
and a method that reads messages itself, adds up (`sums`) or weighs by rows (`by`) is refused. docs/explanation/trust.md says what
the promise is about and what it is not about.
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
from fedloom.trust.access import SealedMessages, use_of_messages
from fedloom.trust.centres import clip_factor, joint_norm


class PrivacySettings(Section):
    """Client-level differential privacy: the released models hardly depend on any one client."""

    clip: float = Field(1.0, gt=0, description="the largest L2 norm of a client's whole update")
    noise: float = Field(1.0, gt=0, description="noise multiplier: std of the noise on the sum of updates, over clip")
    delta: float = Field(1e-5, gt=0, lt=1, description="δ of (ε, δ); well below 1 / number of clients")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="fixed: as many clients each round, ε for one client exchanged; poisson: each joins by itself with "
        "probability training.fraction, ε for one client more or less",
    )


class PrivateAverage:
    """Clipping, the uniform mean and noise. Streams: constant memory."""

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
        """The noisy mean of clipped updates, added to the old state; a second one in a round would cost ε again."""
        if not isinstance(messages, SealedMessages):
            raise UserError(self.refusal)
        if rows or sums:
            raise UserError(f"privacy: method.name = '{self.method.name}' {_ADDS_UP}; {_REMEDY}")
        if server.round == self._last:
            raise UserError(
                f"privacy: method.name = '{self.method.name}' averages twice in a round, and ε counts once; {_REMEDY}"
            )
        self._last = server.round
        old = {
            name: value
            for name, value in server.state.items()
            if value.is_floating_point() and under(name, self.method.up) and (paths is None or under(name, paths))
        }
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in old.items()}
        for message in messages.open():
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
        new = (old + (total + noise) / self.participants).to(old.dtype)
        if name.endswith("running_var"):  # noise can make a variance negative; repairing it costs no privacy
            new = torch.where(new > 0, new, old)
        return new


Draw = Callable[[torch.Size], Tensor]
"""Draws float64 standard normals of a shape."""
Normals = Callable[[int], Draw]
"""Where the noise of a round comes from."""


def seeded_normals(seed: int) -> Normals:
    """Noise that follows from a seed: simulations can be repeated, and those who know the seed can subtract it."""

    def of_round(round: int) -> Draw:
        generator = torch.Generator().manual_seed(key(seed, round, "privacy"))
        return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)

    return of_round


def system_normals(round: int) -> Draw:
    """Noise from the operating system's randomness, which nobody can repeat: what a deployment uses.

    Box and Muller's transform of uniform numbers of 53 bits.
    """

    def draw(shape: torch.Size) -> Tensor:
        count = shape.numel()
        bits = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count) >> np.uint64(11)
        radius = np.sqrt(-2 * np.log((bits[0] + 1.0) * 2.0**-53))  # of (0, 1]
        return torch.from_numpy(radius * np.cos(2 * np.pi * 2.0**-53 * bits[1])).reshape(shape)

    return draw


_REMEDY = "choose another (`fedloom methods` says which can), or remove the privacy section"
_READS = "looks at single clients' messages, which clipping and noise do not cover"
_ADDS_UP = "adds up or weighs by what clients send (class counts, control variates), which clipping does not cover"


def uncovered(method: Method) -> str | None:
    """Why a method cannot be private, as far as a rehearsal of its `combine` shows; messages are sealed anyway."""
    if method.pooled:
        return "pools all data in one place, so that there are no clients to protect"
    return {"reads": _READS, "adds up": _ADDS_UP}.get(use_of_messages(method))


class Spending:
    """ε after so many rounds, by dp-accounting's RDP accountant.

    `fixed`: m of N clients without replacement (Wang, Balle, Kasiviswanathan, 2019); neighbours differ in one client's
    data, which moves a sum of clipped updates by up to 2·clip, so that the accountant's noise multiplier is noise / 2.
    Its bound can exceed that of no sampling at all, which holds as well: the smaller counts, order by order.
    `poisson`: each client with probability q (Mironov, Talwar, Zhang, 2019); neighbours have one client more or less.
    """

    def __init__(self, settings: PrivacySettings, clients: int, fraction: float, participants: int):
        try:
            import dp_accounting
            from absl import logging
            from dp_accounting import rdp
        except ImportError:
            raise UserError(
                "privacy: ε is reckoned by dp-accounting, which is not installed: pip install 'fedloom[privacy]'"
            ) from None
        self._delta, self._epsilon = settings.delta, rdp.compute_epsilon
        exchanged = dp_accounting.NeighboringRelation.REPLACE_ONE
        if settings.sampling == "fixed":
            whole = dp_accounting.GaussianDpEvent(settings.noise / 2)
            events = [whole, dp_accounting.SampledWithoutReplacementDpEvent(clients, participants, whole)]
            accountants = [rdp.RdpAccountant(neighboring_relation=exchanged) for _ in events]
        else:
            events = [dp_accounting.PoissonSampledDpEvent(fraction, dp_accounting.GaussianDpEvent(settings.noise))]
            accountants = [rdp.RdpAccountant()]
        heard = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)  # it warns of orders that it leaves out, which is its business
        try:
            for accountant, event in zip(accountants, events, strict=True):
                accountant.compose(event)
        finally:
            logging.set_verbosity(heard)
        self._orders = accountants[0].orders
        self._round = np.minimum.reduce([accountant.rdp for accountant in accountants])

    def epsilon(self, rounds: int) -> float:
        """ε of all that has been released after so many rounds: Rényi divergences of rounds add up."""
        return float(self._epsilon(self._orders, rounds * self._round, self._delta)[0])
