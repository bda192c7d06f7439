"""The recipe sections `robust`, `attack`, `privacy` and `secure`, set up for one experiment."""

import logging
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Runner
from fedloom.core.message import Message, Signature
from fedloom.core.method import Method
from fedloom.core.server import Combination
from fedloom.core.task import Task
from fedloom.core.trigger import Trigger
from fedloom.engines import Engine
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.sampling import Sampling
from fedloom.trust.access import RestrictedMessages, use_of_messages
from fedloom.trust.attack import Attack, FalsifyMessages
from fedloom.trust.buckets import seeded_orders, system_orders
from fedloom.trust.privacy import PrivateAverage, Spending, seeded_normals, system_normals
from fedloom.trust.robust import RobustAverage

if TYPE_CHECKING:
    from fedloom.experiment.secure import SecureRounds

SIMULATED = "privacy is simulated: the noise follows from the seed, so those who know the seed can subtract it"
SHOWN = 20
"""Number of hostile clients that the summary names."""
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
        self.attack = Attack(attack, clients, recipe.seed, by=method.by) if attack else None
        self.spending: Spending | None = None
        self.notes: list[str] = []
        """Remarks for the run's summary."""
        if self.attack is not None:
            hostile = sorted(self.attack.hostile)
            shown = ", ".join(map(str, hostile[:SHOWN])) + (", …" if len(hostile) > SHOWN else "")
            self.notes.append(f"attack.kind = '{self.attack.settings.kind}': {len(hostile)} hostile clients: {shown}")
        if robust is not None:
            orders = system_orders if deployed else seeded_orders(recipe.seed)
            self.combination = RobustAverage(robust, method, participants, orders)
        if privacy is not None:
            fraction = recipe.training.fraction
            planned = fraction * len(clients) if sampling.poisson else participants
            normals = system_normals if deployed else seeded_normals(recipe.seed)
            self.combination = PrivateAverage(privacy, method, planned, normals)
            if not deployed:
                self.notes.append(SIMULATED)
            hidden = recipe.secure is not None
            self.spending = Spending(privacy, len(clients), fraction, participants, secure_aggregation=hidden)
        self.secure = _secure_rounds(recipe, method, participants)
        if self.secure is not None:
            self.combination = self.secure.average
        if self.combination is not None and use_of_messages(method) == "unknown":
            log.warning(
                "%s: how the combine of method.name = '%s' uses messages cannot be determined in advance; the run "
                "fails in its first round if combine reads messages directly instead of passing them to server.average",
                "robust" if robust else "privacy", method.name,
            )  # fmt: skip

    def poisoned(self, task: Task) -> Task:
        """Return the task with hostile clients' falsified training data; without a data attack, return it unchanged."""
        return task if self.attack is None else self.attack.poisoned(task)

    def trigger(self, task: Task) -> Trigger | None:
        """Return the trigger of a backdoor attack; None without one."""
        return None if self.attack is None else self.attack.trigger(task)

    def around(self, engine: Engine) -> Runner:
        """Wrap the engine so that hostile clients falsify their messages and all clients mask them."""
        wrapped: Runner = engine
        if self.attack is not None and self.attack.settings.falsifies_messages:
            wrapped = FalsifyMessages(engine, self.attack)
        return wrapped if self.secure is None else self.secure.around(wrapped, engine)

    def expected(self, sent: Signature) -> Signature:
        """Return the tensors of a client's message as the server gets it."""
        return sent if self.secure is None else self.secure.average.contribution(sent).signature

    def restricted(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Return the messages for a method's `combine`; if a rule replaces the mean, only this rule can read them."""
        return messages if self.combination is None else RestrictedMessages(messages, self.combination.refusal)

    def note(self, record: RoundRecord, chosen: Iterable[int]) -> None:
        """Add the number of hostile participants and the spent privacy budget to a round's record."""
        if self.attack is not None:
            record["hostile"] = len(self.attack.hostile.intersection(chosen))
        if self.spending is not None:
            record["epsilon"] = self.spending.epsilon(record["round"]) if self.method.up else 0.0
        if self.secure is not None:
            record["quantisation"] = self.secure.average.error


def _secure_rounds(recipe: Recipe, method: Method, participants: int) -> "SecureRounds | None":
    if recipe.secure is None:
        return None
    if find_spec("cryptography") is None:
        raise UserError("secure: the package cryptography is not installed: pip install 'fedloom[secure]'")
    from fedloom.experiment.secure import SecureRounds

    return SecureRounds(recipe.secure, recipe.privacy, method, participants, recipe.seed)
