"""Runs communication rounds: draws clients, has the method combine their answers, and evaluates."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

from fedloom.config.recipe import Recipe
from fedloom.core.flat_state import FlatState
from fedloom.core.job import Runner
from fedloom.core.message import Message, signature
from fedloom.core.method import Method
from fedloom.core.reading import without_nan
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.task import EVERYONE, Task
from fedloom.engines import Engine
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.evaluation import Answer, Evaluator
from fedloom.experiment.middleware import EncodeMessages, RecordMessages, ValidateResults
from fedloom.experiment.records import Measures, RoundRecord
from fedloom.experiment.round import Round
from fedloom.experiment.sampling import Sampling
from fedloom.experiment.trust import Trust
from fedloom.trust.faults import LoseMessages
from fedloom.trust.ledger import Ledger

ATTEMPTS = 5
"""Maximum number of attempts at a round, each with other clients; then the run stops because too few answered."""


@dataclass
class Rounds:
    """Runs the rounds of an experiment, one at a time."""

    recipe: Recipe
    task: Task
    setup: Setup
    method: Method
    sampling: Sampling
    trust: Trust
    engine: Engine
    server: Server
    memory: ClientStore
    evaluator: Evaluator
    ledger: Ledger
    extensible: RoundRecord = field(init=False)
    """The record of the last round as it would be if more rounds followed."""
    _shown: set[str] = field(default_factory=set)
    """Errors that have been explained in the log."""

    def run(self, number: int) -> RoundRecord:
        """Run one communication round, with an evaluation if one is due.

        Args:
            number: Number of the round, from 1.

        Returns:
            The record of the round, a line of metrics.jsonl.
        """
        start = perf_counter()
        training = self.recipe.training
        traffic = RecordMessages(self.trust.around(self.engine), self.ledger)
        round = self._begin(self._layered(traffic), number)
        self.method.combine(self.server, self.trust.restricted(round.answers))
        round.commit()
        record: RoundRecord = {
            "round": number,
            "lr": training.lr(number),
            "clients": round.answered,
            "loss": round.loss,
            "up_bytes": 0 if self.method.pooled else round.bytes_up // max(1, round.answered),
            "down_bytes": traffic.bytes_down // max(1, traffic.sent),
            "failed": dict(sorted(round.failed.items())),
        }
        self.trust.note(record, round.clients)
        if round.attempt:
            record["attempts"] = round.attempt + 1
        record["train_seconds"] = perf_counter() - start
        last, due = number == training.rounds, number % self.recipe.evaluation.every == 0
        restores = training.patience is not None
        trained = record.copy()
        if last or due:
            # with early stopping, the final evaluation is that of the restored state
            record |= cast(RoundRecord, self.evaluate(number, final=last and not restores))
        record["seconds"] = perf_counter() - start
        if last:
            interim = self.evaluator.measures() if restores else self.evaluator.interim()
            trained |= cast(RoundRecord, interim if due else {})
            trained["seconds"] = record["seconds"]
            self.extensible = without_nan(trained)
        return record

    def evaluate(self, number: int, *, final: bool) -> Measures:
        """Evaluate the models; see `Evaluator.evaluate`."""
        # in a simulation, an evaluation sends no messages
        traced = RecordMessages(self.engine, self.ledger, "evaluation") if self.task.elsewhere else self.engine
        return self.evaluator.evaluate(self._encoding(traced), number, self.server.state, self._answer(), final=final)

    def _layered(self, traffic: Runner) -> Runner:
        """Wrap the engine for a round; from the outside in: lost messages, validation, encoding, ledger, engine."""
        inner = self._encoding(self.engine if self.method.pooled else traffic)  # pooled: no messages to record
        valid = ValidateResults(inner, self.trust.expected(signature(self.engine.server_workspace.sent)))
        faults = self.recipe.faults
        return LoseMessages(valid, faults, self.recipe.seed) if faults.lost else valid

    def _encoding(self, inner: Runner) -> Runner:
        codec, workspace = self.setup.codec, self.engine.server_workspace
        encodes = codec.up is not None or codec.down is not None
        return EncodeMessages(inner, codec, workspace) if encodes else inner

    def _begin(self, layered: Runner, number: int) -> Round:
        """Start a round and wait for `min_clients` answers; if fewer arrive, retry with other clients."""
        training = self.recipe.training
        least = 0 if self.sampling.poisson else training.min_clients  # a Poisson sample may be empty
        asked: set[int] = set()
        for attempt in range(ATTEMPTS):
            chosen = self.sampling.draw(number, attempt, asked)
            asked |= set(chosen)
            self.server.begin(number)
            answer = self._answer()
            # created before the first client answers: answers change the server's state
            messages = {client: answer(client) for client in chosen}
            needed = least
            if self.trust.secure is not None:
                begun = self.trust.secure.begin(self.engine, self.ledger, number, attempt, chosen, self._samples)
                needed = max(least, begun)
            skip = training.on_error == "skip"
            name_of = self.task.federation.name
            round = Round(number, chosen, messages, layered, self.memory, attempt, skip, self._shown, name_of)
            if round.has(needed):
                return round
            round.refuse_too_few(needed, last=attempt == ATTEMPTS - 1, masked=needed > least)
        raise AssertionError("the last attempt raises")

    def _samples(self, client: int) -> int:
        """Return the number of training samples of a client."""
        return len(self.task.samples(client))

    def _answer(self) -> Answer:
        """Return a function from client to server message: one shared message, unless `message_for` is overridden."""
        if self.method.overrides("message_for"):
            return lambda client: Message(self.method.message_for(self.server, client), client=client)
        shared = Message(FlatState.of(self.method.message_for(self.server, EVERYONE)))
        return lambda client: shared
