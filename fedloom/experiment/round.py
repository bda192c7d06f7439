"""One communication round: jobs to the clients, and which of their answers count."""

import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedloom.core.failures import Failure, RoundError
from fedloom.core.job import Job, Result, Runner
from fedloom.core.message import Message
from fedloom.experiment.client_store import ClientStore

log = logging.getLogger("fedloom")


@dataclass
class Round:
    """One attempt at a round.

    Clients' new memories are staged in the store as their answers arrive; `commit` makes them the clients' memories.
    Memories are read as the engine asks for jobs, and messages stream through, so that few are in RAM at once.
    """

    number: int
    clients: list[int]
    messages: dict[int, Message]
    """What each client gets; each is released as its job is made."""
    engine: Runner
    memory: ClientStore
    attempt: int = 0
    skip_errors: bool = False
    """Leave out a client that raises, instead of ending the run."""
    shown: set[str] = field(default_factory=set)
    """Errors whose tracebacks have been logged: each is logged once in a run."""

    answered: int = 0
    samples: int = 0
    bytes_up: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.memory.discard()
        self._loss = 0.0
        self._raised: tuple[int, Failure] | None = None
        self._first: deque[Message] = deque()
        self._results = self.engine.run(self._jobs())
        self.answers: Iterator[Message] = self._stream()
        """Messages of the clients that answered, one by one."""

    def has(self, needed: int) -> bool:
        """Whether at least so many clients answer; waits for them."""
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
        """Ends the round: what the clients remember of it becomes their memory."""
        for _ in self.answers:  # a method that combines nothing, or not all, still has its clients work
            pass
        self.memory.commit()

    @property
    def loss(self) -> float | None:
        """Mean training loss over samples."""
        return self._loss / self.samples if self.samples else None

    def refuse_too_few(self, needed: int, *, last: bool) -> None:
        """Logs that the round is retried with other clients; raises after the last attempt, or if that is no use."""
        if self._raised is not None and self.failed["raised"] == self.failed.total():
            raise self._raised[1].error(self._raised[0], self.number)
        answered = len(self.clients) - self.failed.total()
        why = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.failed.items()))
        words = f"round {self.number}: {answered} of {len(self.clients)} clients answered ({why})"
        if last:
            raise RoundError(
                f"{words}, and training.min_clients = {needed}; retrying with other clients did not help: see the log "
                "above, and lower training.min_clients or raise training.fraction"
            )
        log.warning(f"{words}; training.min_clients = {needed}, so it is retried with other clients")

    def _jobs(self) -> Iterator[Job]:
        for client in self.clients:
            message, memory = self.messages.pop(client), self.memory.get(client)
            yield Job("update", self.number, message, client=client, memory=memory, attempt=self.attempt)

    def _accepted(self, result: Result) -> Message | None:
        """The message of a client that answered. One that raises ends the run, unless errors are skipped."""
        if result.error is not None:
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
        words = f"round {self.number}: client {client} is left out ({failure.kind.replace('_', ' ')}): {failure.why}"
        if own and failure.why not in self.shown:
            self.shown.add(failure.why)
            words += f"\n{failure.trace}(shown once; training.on_error = 'stop' would end the run here)"
        log.warning(words)
