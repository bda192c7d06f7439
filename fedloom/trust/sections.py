"""What a recipe says of hostile clients and of privacy, made ready for one experiment."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fedloom.engines import Engine
from fedloom.errors import UserError
from fedloom.job import Job, Result
from fedloom.message import Message
from fedloom.server import Combination
from fedloom.trust.attack import Attack
from fedloom.trust.combination import RobustAverage
from fedloom.trust.privacy import PrivateAverage, Spending
from fedloom.trust.rehearsal import use_of_messages
from fedloom.trust.sealed import Sealed

if TYPE_CHECKING:
    from fedloom.methods.base import Method
    from fedloom.recipe import Recipe
    from fedloom.sampling import Sampling

log = logging.getLogger("fedloom")


class Trust:
    """The sections `robust`, `attack` and `privacy`. Without them nothing is changed, in any bit."""

    def __init__(self, recipe: "Recipe", method: "Method", sampling: "Sampling"):
        clients, participants = sampling.trainers, sampling.per_round
        robust, attack, privacy = recipe.robust, recipe.attack, recipe.privacy
        if method.pooled and (section := "robust" if robust else "attack" if attack else None):
            raise UserError(
                f"{section}: method.name = '{method.name}' pools all data in one place: no client sends anything; "
                f"choose a federated method, or remove the {section} section"
            )
        self.method = method
        self.combination: Combination | None = None
        self.attack = Attack(attack, clients, recipe.seed, uncounted=method.by.values()) if attack else None
        self.spending: Spending | None = None
        if robust is not None:
            self.combination = RobustAverage(robust, method, participants)
        if privacy is not None:
            fraction = recipe.training.fraction
            meant = fraction * len(clients) if sampling.poisson else participants
            self.combination = PrivateAverage(privacy, method, meant, recipe.seed)
            self.spending = Spending(privacy, len(clients), fraction, participants)
        if self.combination is not None and use_of_messages(method) == "unknown":
            log.warning(
                "%s: what the combine of method.name = '%s' does with messages cannot be told beforehand; the run "
                "ends in its first round if it reads them itself instead of giving them to server.average",
                "robust" if robust else "privacy", method.name,
            )  # fmt: skip

    def run(self, engine: Engine, jobs: Iterable[Job]) -> Iterator[Result]:
        """The engine's results; hostile clients falsify theirs."""
        return engine.run(jobs) if self.attack is None else self.attack.run(engine, jobs)

    def sealed(self, messages: Iterator[Message]) -> Iterator[Message]:
        """What a method's `combine` gets: where something stands in for the mean, it cannot read messages itself."""
        return messages if self.combination is None else Sealed(messages, self.combination.refusal)

    def record(self, round: int, chosen: Iterable[int]) -> dict[str, Any]:
        """What a round's record says of it."""
        told: dict[str, Any] = {}
        if self.attack is not None:
            told["hostile"] = len(self.attack.hostile.intersection(chosen))
        if self.spending is not None:
            told["epsilon"] = self.spending.epsilon(round) if self.method.up else 0.0
        return told
