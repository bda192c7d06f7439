"""The recipe's sections `robust`, `attack` and `privacy`, ready for one experiment."""

import logging
from collections.abc import Iterable, Iterator

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Runner
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Combination
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.sampling import Sampling
from fedloom.trust.access import SealedMessages, use_of_messages
from fedloom.trust.attack import Attack, FalsifyMessages
from fedloom.trust.privacy import PrivateAverage, Spending, seeded_normals, system_normals
from fedloom.trust.robust import RobustAverage

SIMULATED = "privacy is simulated: the noise follows from the seed, so those who know the seed can subtract it"
log = logging.getLogger("fedloom")


class Trust:
    """Attackers, and what replaces the mean. Without these sections nothing is changed, in any bit.

    In a simulation all randomness follows from the seed. `deployed`: every member knows the seed, so privacy's noise
    comes from the operating system instead.
    """

    def __init__(self, recipe: Recipe, method: Method, sampling: Sampling, *, deployed: bool = False):
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
        self.notes: list[str] = []
        """What a run's summary says beside its figures."""
        if robust is not None:
            self.combination = RobustAverage(robust, method, participants)
        if privacy is not None:
            fraction = recipe.training.fraction
            meant = fraction * len(clients) if sampling.poisson else participants
            normals = system_normals if deployed else seeded_normals(recipe.seed)
            self.combination = PrivateAverage(privacy, method, meant, normals)
            if not deployed:
                self.notes.append(SIMULATED)
            self.spending = Spending(privacy, len(clients), fraction, participants)
        if self.combination is not None and use_of_messages(method) == "unknown":
            log.warning(
                "%s: what the combine of method.name = '%s' does with messages cannot be told beforehand; the run "
                "ends in its first round if it reads them itself instead of giving them to server.average",
                "robust" if robust else "privacy", method.name,
            )  # fmt: skip

    def around(self, engine: Runner) -> Runner:
        """The engine; with an attack, hostile clients falsify their messages."""
        return engine if self.attack is None else FalsifyMessages(engine, self.attack)

    def sealed(self, messages: Iterator[Message]) -> Iterator[Message]:
        """What a method's `combine` gets: where something replaces the mean, it cannot read messages itself."""
        return messages if self.combination is None else SealedMessages(messages, self.combination.refusal)

    def note(self, record: RoundRecord, chosen: Iterable[int]) -> None:
        """Adds to a round's record: attackers among the participants, privacy spent."""
        if self.attack is not None:
            record["hostile"] = len(self.attack.hostile.intersection(chosen))
        if self.spending is not None:
            record["epsilon"] = self.spending.epsilon(record["round"]) if self.method.up else 0.0
