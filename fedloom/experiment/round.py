"""One communication round: sends jobs to clients, and decides which of their answers count."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fedloom.core.failures import CAUSES, NOT_FINITE, DivergedError, Failure, RoundError
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message
from fedloom.experiment.client_store import ClientStore

log = logging.getLogger("fedloom")
SHOWN_REFUSALS = 3
"""Number of clients whose refusals are quoted in the error that ends a run."""


@dataclass
class Round:
    """One attempt at a round.

    Clients' new memories are staged in the store as their answers arrive; `commit` makes them permanent. Memories are
    read when the engine asks for jobs, and messages are streamed, so that few of them are in RAM at once.
    """

    number: int
    clients: list[int]
    messages: dict[int, Message]
    """The server's message for each client; removed when the client's job is created."""
    engine: Runner
    memory: ClientStore
    attempt: int = 0
    skip_errors: bool = False
    """Whether a client that raises an exception is left out; otherwise it ends the run."""
    shown: set[str] = field(default_factory=set)
    """Errors that have been explained in the log; each is explained once per run."""
    name_of: Callable[[int], str] = "client {}".format
    """Returns the name of a client, for the log."""

    answered: int = 0
    """Number of clients that answered so far."""
    samples: int = 0
    """Training samples of the clients that reported a loss."""
    bytes_up: int = 0
    """Bytes of the answers so far."""
    failed: Counter[str] = field(default_factory=Counter)
    """Number of failed clients so far, by kind of failure."""

    def __post_init__(self) -> None:
        self.memory.discard()
        self._loss = 0.0
        self._raised: tuple[int, Failure] | None = None
        self._diverged: int | None = None
        self._refusals: list[str] = []
        self._first: deque[Message] = deque()
        self._results = self.engine.run(self._jobs())
        self.answers: Iterator[Message] = self._stream()
        """Messages of the clients that answered, as a stream."""

    def has(self, needed: int) -> bool:
        """Wait until `needed` clients have answered; return False if fewer do."""
        while len(self._first) < needed and (result := next(self._results, None)) is not None:
            if (message := self._accepted(result)) is not None:
                self._first.append(message)
        return len(self._first) >= needed

    def _stream(self) -> Iterator[Message]:
        while self._first:
            yield self._first.popleft()
        for result in self._results:
            if (message := self._accepted(result)) is not None:
                yield message

    def commit(self) -> None:
        """End the round: wait for the remaining clients, and make the staged memories permanent."""
        for _ in self.answers:  # a method need not combine all messages, but all clients must have worked
            pass
        self.memory.commit()

    @property
    def loss(self) -> float | None:
        """Mean training loss over samples."""
        return self._loss / self.samples if self.samples else None

    def refuse_too_few(self, needed: int, *, last: bool, masked: bool = False) -> None:
        """Log that too few clients answered and the round will be retried with other clients.

        Args:
            needed: Number of clients that had to answer.
            last: Whether this was the last attempt.
            masked: Whether secure aggregation needs them, and not `training.min_clients`.

        Raises:
            RoundError: This was the last attempt.
            Exception: All failures are exceptions raised by clients: a retry would not help, so the first is raised.
        """
        if self._raised is not None and self.failed["raised"] == self.failed.total():
            raise self._raised[1].error(self._raised[0], self.number)
        answered = len(self.clients) - self.failed.total()
        why = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.failed.items()))
        words = f"round {self.number}: {answered} of {len(self.clients)} clients answered ({why})"
        if last and self._diverged is not None and self.failed["invalid"] == self.failed.total():
            raise DivergedError(
                f"{words}: the training of {self.name_of(self._diverged)} and others diverged; lower "
                "training.optimizer.lr, or see the other causes in the log above"
            )
        field = "secure.threshold" if masked else "training.min_clients"
        rule = f"{field} needs {needed} of them" if masked else f"{field} = {needed}"
        if last and self._refusals:  # fewer or less protected clients are no remedy for what a client objects to
            whys = "; ".join(sorted(self._refusals)[:SHOWN_REFUSALS])
            raise RoundError(f"{words}, but {rule}: {whys}; remove the causes, then resume the run")
        if last:
            raise RoundError(
                f"{words}, but {rule}; retries with other clients failed too: see the log above, and lower {field} or "
                "raise training.fraction"
            )
        log.warning(f"{words}; {rule}, so the round is retried with other clients")

    def _jobs(self) -> Iterator[Job]:
        for client in self.clients:
            message, memory = self.messages.pop(client), self.memory.get(client)
            yield Job("update", self.number, message, client=client, memory=memory, attempt=self.attempt)

    def _accepted(self, result: Result) -> Message | None:
        """Record a result and return its message; None if the client failed.

        Raises:
            Exception: The client raised it, and errors are not skipped.
        """
        if result.error is not None:
            if result.memory is not None:  # the client has trained, but its message was lost
                self.memory.stage(result.client, result.memory)
            self._leave_out(result.client, result.error)
            return None
        message, memory = result.message, result.memory
        assert message is not None
        assert memory is not None
        self.answered += 1
        self.bytes_up += message.nbytes
        if result.loss is not None:
            self._loss += float(result.loss) * message.samples
            self.samples += message.samples
        self.memory.stage(result.client, memory)
        return message

    def _leave_out(self, client: int, failure: Failure) -> None:
        own = failure.kind == "raised" and not failure.injected
        if own and self._raised is None:
            self._raised = client, failure
        if own and (failure.mistake or not self.skip_errors):
            raise failure.error(client, self.number)
        self.failed[failure.kind] += 1
        if failure.refusal:
            self._refusals.append(failure.why)
        kind = failure.kind.replace("_", " ")
        words = f"round {self.number}: {self.name_of(client)} is left out ({kind}): {failure.why}"
        if own and failure.why not in self.shown:
            self.shown.add(failure.why)
            words += f"\n{failure.trace}(shown once; training.on_error = 'stop' would end the run here)"
        if failure.kind == "invalid" and NOT_FINITE in failure.why:
            self._diverged = client if self._diverged is None else self._diverged
            if NOT_FINITE in self.shown:
                log.info(words)  # later clients are counted in the rounds' records
                return
            self.shown.add(NOT_FINITE)
            words += f"; {CAUSES} (reported once)"
        log.warning(words)
