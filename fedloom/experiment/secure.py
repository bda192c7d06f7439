"""Secure aggregation in the round loop: starts each round's protocol and masks the messages of simulated clients."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import signature
from fedloom.core.method import Method
from fedloom.engines import Engine
from fedloom.trust.ledger import Ledger
from fedloom.trust.privacy import PrivacySettings
from fedloom.trust.secure.average import SecureAverage
from fedloom.trust.secure.coordinator import SecureSum
from fedloom.trust.secure.protocol import Parties, Stage, Terms
from fedloom.trust.secure.settings import SecureSettings
from fedloom.trust.secure.simulation import LocalParties, MaskMessages


class SecureRounds:
    """The rounds of an experiment with secure aggregation.

    An engine whose clients are elsewhere implements `Parties`, and its clients mask their messages themselves. With any
    other engine the clients are simulated: their messages are masked when the engine returns them.

    Args:
        settings: The recipe section `secure`.
        privacy: The recipe section `privacy`.
        method: The method.
        participants: Planned number of clients per round.
        seed: Seed of simulated noise.
    """

    def __init__(
        self, settings: SecureSettings, privacy: PrivacySettings | None, method: Method, participants: int, seed: int
    ):
        self.average = SecureAverage(settings, privacy, method, participants)
        self._settings, self._seed = settings, seed
        self._local = LocalParties(settings)

    def begin(
        self,
        engine: Engine,
        ledger: Ledger,
        round: int,
        attempt: int,
        clients: list[int],
        samples: Callable[[int], int],
    ) -> int:
        """Exchange the keys of a round.

        Args:
            engine: Reaches the clients.
            ledger: Records what is exchanged.
            round: Number of the round.
            attempt: Number of earlier attempts at this round.
            clients: The round's clients.
            samples: Returns the number of training samples of a client.

        Returns:
            The number of clients that must respond.
        """
        parties: Parties = self._local
        if isinstance(engine, Parties):
            parties = engine
        terms = Terms(*parties.scope, round, attempt, self._settings)
        found = SecureSum(terms, RecordRequests(parties, ledger, round), clients, samples)
        self.average.begin(found, signature(engine.server_workspace.sent))
        return found.needed

    def around(self, wrapped: Runner, engine: Engine) -> Runner:
        """Wrap the engine so that the server gets only masked messages.

        Args:
            wrapped: The engine, possibly with other middleware around it.
            engine: The engine.
        """
        if not isinstance(engine, Parties):
            workspace = engine.server_workspace
            contribution = self.average.contribution(signature(workspace.sent))
            codec, initial = workspace.setup.codec, workspace.initial
            wrapped = MaskMessages(wrapped, self._local, contribution, self._seed, codec, initial)
        return SkipFailedClients(wrapped, self.average)


class SkipFailedClients:
    """Middleware that gives jobs only to clients that have exchanged keys; the others' results are failures."""

    def __init__(self, engine: Runner, average: SecureAverage):
        self._engine, self._average = engine, average

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield a failure for each client without keys, then the results of the others."""
        assert self._average.sum is not None, "SecureRounds.begin was not called"
        failed: dict[int, Failure] = dict(self._average.sum.failed)
        for client, failure in failed.items():
            yield Result(client, error=failure)
        yield from self._engine.run(job for job in jobs if job.client not in failed)


class RecordRequests:
    """Records the bytes of requests and answers in the ledger."""

    def __init__(self, parties: Parties, ledger: Ledger, round: int):
        self._parties, self._ledger, self._round = parties, ledger, round

    @property
    def scope(self) -> tuple[str, str]:
        """Name of the run, and hash of the recipe."""
        return self._parties.scope

    def ask(self, stage: Stage, round: int, requests: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Send requests, and return the answers unchanged."""
        for client, body in requests.items():
            self._ledger.add_bytes("down", "secure", round, client, len(body))
        answers = self._parties.ask(stage, round, requests)
        for client, answer in answers.items():
            if isinstance(answer, bytes):
                self._ledger.add_bytes("up", "secure", round, client, len(answer))
            elif answer.reported:
                self._ledger.add_error(round, client, answer.why)
        return answers

    def relay(self, client: int, body: bytes) -> None:
        """Pass shares on."""
        self._ledger.add_bytes("down", "secure", self._round, client, len(body))
        self._parties.relay(client, body)
