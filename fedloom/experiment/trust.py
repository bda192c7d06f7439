"""The recipe sections `robust`, `attack` and `privacy`, set up for one experiment."""

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
    """Hostile clients, and the rule that replaces the mean; without these sections, a run is unchanged.

    In a simulation all randomness is derived from the seed. In a deployment (`deployed`) every member knows the seed,
    so the noise for privacy comes from the operating system.
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
        """Remarks for the run's summary."""
        if robust is not None:
            self.combination = RobustAverage(robust, method, participants)
        if privacy is not None:
            fraction = recipe.training.fraction
            planned = fraction * len(clients) if sampling.poisson else participants
            normals = system_normals if deployed else seeded_normals(recipe.seed)
            self.combination = PrivateAverage(privacy, method, planned, normals)
            if not deployed:
                self.notes.append(SIMULATED)
            self.spending = Spending(privacy, len(clients), fraction, participants)
        if self.combination is not None and use_of_messages(method) == "unknown":
            log.warning(
                "%s: how the combine of method.name = '%s' uses messages cannot be determined in advance; the run "
                "fails in its first round if combine reads messages directly instead of passing them to server.average",
                "robust" if robust else "privacy", method.name,
            )  # fmt: skip

    def around(self, engine: Runner) -> Runner:
        """Wrap the engine so that hostile clients falsify their messages; without an attack, return it unchanged."""
        return engine if self.attack is None else FalsifyMessages(engine, self.attack)

    def sealed(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Return the messages for a method's `combine`; if a rule replaces the mean, only this rule can read them."""
        return messages if self.combination is None else SealedMessages(messages, self.combination.refusal)

    def note(self, record: RoundRecord, chosen: Iterable[int]) -> None:
        """Add the number of hostile participants and the spent privacy budget to a round's record."""
        if self.attack is not None:
            record["hostile"] = len(self.attack.hostile.intersection(chosen))
        if self.spending is not None:
            record["epsilon"] = self.spending.epsilon(record["round"]) if self.method.up else 0.0
