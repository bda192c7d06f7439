"""What goes out to clients and comes back in one attempt at a round: jobs, results, messages, all of it counted."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fedloom.envelope import MessageError
from fedloom.failing.failures import Failure
from fedloom.job import Job, Result
from fedloom.lane import Lane, Setup
from fedloom.message import Message
from fedloom.recipe import Recipe
from fedloom.storage.memory import ClientStore
from fedloom.trust.ledger import Ledger


class Exchange:
    """One attempt at a round. Clients' memories are read as jobs are made, and committed as messages are accepted."""

    def __init__(
        self, recipe: Recipe, setup: Setup, memory: ClientStore, ledger: Ledger, *, round: int, attempt: int = 0
    ):
        self._recipe, self._setup, self._memory, self._ledger = recipe, setup, memory, ledger
        self._round, self._attempt = round, attempt
        self._pooled = setup.method.pooled  # nothing travels
        self._given: dict[int, Message] = {}
        self._up = self._down = self._sent = self._answers = self._samples = 0
        self._loss = 0.0

    def jobs(self, clients: list[int], message_for: Callable[[int], Message]) -> Iterator[Job]:
        """Made as an engine asks for them, so that few clients' memories are in RAM at once."""
        for client in clients:
            message = self._given[client] = message_for(client)
            self._sent += 1
            if not self._pooled:
                self._down += message.nbytes
                self._ledger.add("down", self._round, client, message)
            fault, delay = self._recipe.faults.draw(self._recipe.seed, self._round, client, self._attempt)
            memory = self._memory.get(client)
            yield Job("update", self._round, message, client=client, memory=memory, fault=fault, delay=delay)

    def read(self, results: Iterable[Result], home: Lane) -> Iterator[Result]:
        """What leaves a client is in the ledger, whatever becomes of it; then it is as the server reads it.

        A message that cannot be read is a failure like others.
        """
        wire = self._setup.wire
        for result in results:
            received = self._given.pop(result.client, None)
            if result.message is not None and not self._pooled:
                self._ledger.add("up", self._round, result.client, result.message)
            if result.message is not None and received is not None and wire.up is not None:
                try:
                    basis = wire.at_client(received, home.initial)
                    result.message = wire.at_server(result.message, basis, home.sent)
                except MessageError as error:
                    result = Result(result.client, error=Failure("invalid", str(error)))
            yield result

    def accepted(self, results: Iterable[Result]) -> Iterator[Message]:
        """Messages one by one; a client's memory is committed together with its message."""
        for result in results:
            assert result.message is not None
            assert result.memory is not None
            self._answers += 1
            self._up += 0 if self._pooled else result.message.nbytes
            if result.loss is not None:
                self._loss += float(result.loss) * result.message.samples
                self._samples += result.message.samples
            self._memory[result.client] = result.memory
            yield result.message

    def record(self) -> dict[str, Any]:
        """Loss, and bytes per client."""
        return {
            "loss": self._loss / self._samples if self._samples else None,
            "up_bytes": self._up // max(1, self._answers),
            "down_bytes": self._down // max(1, self._sent),
        }
