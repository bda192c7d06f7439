"""Secure aggregation with clients in this process: the same code as in a deployment, without signatures."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fedloom.core.compression import Codec
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message, MessageError
from fedloom.core.rng import key
from fedloom.core.state import State
from fedloom.trust.privacy import Normals, seeded_normals
from fedloom.trust.secure.contribution import Contribution
from fedloom.trust.secure.party import Party
from fedloom.trust.secure.protocol import KeysRequest, Stage, Terms, read
from fedloom.trust.secure.settings import SecureSettings


class Unsigned:
    """Identity of a simulated client: signatures within one process would prove nothing."""

    def sign(self, data: bytes) -> bytes:
        """Return a placeholder."""
        return b"-"

    def verify(self, client: int, data: bytes, signature: bytes) -> None:
        """Accept every signature."""


class LocalParties:
    """The clients of a simulated round.

    Args:
        settings: The recipe section `secure`.
    """

    scope = ("simulation", "")

    def __init__(self, settings: SecureSettings):
        self._settings = settings
        self._parties: dict[int, Party] = {}

    def __getitem__(self, client: int) -> Party:
        return self._parties[client]

    def ask(self, stage: Stage, round: int, requests: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Return the clients' answers."""
        if stage == "keys":
            self._parties = {client: self._party(client, body) for client, body in requests.items()}
        answers: dict[int, bytes | Failure] = {}
        for client, body in requests.items():
            try:
                answers[client] = self._parties[client].answer(stage, body)
            except MessageError as error:
                answers[client] = Failure("dropped", str(error))
        return answers

    def _party(self, client: int, body: bytes) -> Party:
        request = read(body, KeysRequest)
        return Party(client, Terms(*self.scope, request["round"], request["attempt"], self._settings), Unsigned())

    def relay(self, client: int, body: bytes) -> None:
        """Pass the other members' shares to a client."""
        self._parties[client].receive(body)


class MaskMessages:
    """Middleware around an engine that masks clients' messages; a message beyond the range becomes a failure.

    Args:
        engine: The engine, or other middleware.
        parties: The clients of the round.
        contribution: How clients add to the sum.
        seed: Seed of the noise, for `privacy`.
        codec: Decodes the server's messages.
        initial: The initial tensors of clients, to decode messages.
    """

    def __init__(
        self, engine: Runner, parties: LocalParties, contribution: Contribution, seed: int, codec: Codec, initial: State
    ):
        self._engine, self._parties, self._contribution = engine, parties, contribution
        self._seed, self._codec, self._initial = seed, codec, initial

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield results with masked messages."""
        received: dict[int, Message] = {}
        for result in self._engine.run(self._remember(jobs, received)):
            start = received.pop(result.client, None)
            yield result if result.message is None or start is None else self._masked(result, result.message, start)

    def _remember(self, jobs: Iterable[Job], received: dict[int, Message]) -> Iterator[Job]:
        self._round = 0
        for job in jobs:
            self._round = job.round
            received[job.client] = job.message
            yield job

    def _masked(self, result: Result, message: Message, received: Message) -> Result:
        normal = client_normals(self._seed, result.client)(self._round)
        start = self._codec.decode_down(received, self._initial)
        try:
            masked = self._contribution.masked(self._parties[result.client], message, start, normal)
        except MessageError as error:
            return Result(result.client, error=Failure("invalid", str(error)))
        return replace(result, message=masked)


def client_normals(seed: int, client: int) -> Normals:
    """Return the noise of one client, derived from the seed."""
    return seeded_normals(key(seed, client, "noise under secure aggregation"))
