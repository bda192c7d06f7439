"""One attempt at a round: whose answers count, and who is left out of it, with a line in the log and a counter."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fedloom.envelope import Signature, mismatch
from fedloom.failing.failures import Failure, RoundError
from fedloom.job import Result
from fedloom.message import is_count

log = logging.getLogger("fedloom")


class Attendance:
    """Lets usable results pass one by one. What a method combines has been looked at before.

    `told` are the errors whose tracebacks were shown before: each is shown once in a run.
    """

    def __init__(self, expected: Signature, *, round: int, attempt: int = 0, skip: bool, told: set[str]):
        self.failed: Counter[str] = Counter()
        self.answered = 0
        self._attempt = attempt
        self._expected, self._round, self._skip, self._told = expected, round, skip, told
        self._first: tuple[int, Failure] | None = None

    def present(self, results: Iterator[Result]) -> Iterator[Result]:
        """Those who answered. A client that raises ends the run, unless it is to be skipped."""
        for result in results:
            failure = result.error or self._unfit(result)
            if failure is None:
                self.answered += 1
                yield result
            else:
                self._leave_out(result.client, failure)

    def record(self) -> dict[str, Any]:
        """For the round's line in the metrics."""
        attempts = {"attempts": self._attempt + 1} if self._attempt else {}
        return {"failed": dict(sorted(self.failed.items()))} | attempts

    def too_few(self, needed: int, attempts_left: int) -> None:
        """Says that a round is retried; raises if that is no use."""
        if self._first is not None and self.failed["raised"] == self.failed.total():
            raise self._first[1].error(self._first[0], self._round)
        asked = self.answered + self.failed.total()
        why = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(self.failed.items()))
        words = f"round {self._round}: {self.answered} of {asked} clients answered ({why})"
        if not attempts_left:
            raise RoundError(
                f"{words}, and training.min_clients = {needed}; the round was retried with other clients, in vain: "
                "see the log above, and lower training.min_clients or raise training.fraction"
            )
        log.warning(f"{words}; training.min_clients = {needed}, so it is retried with other clients")

    def _leave_out(self, client: int, failure: Failure) -> None:
        own = failure.kind == "raised" and not failure.injected
        if own and self._first is None:
            self._first = client, failure
        if own and (failure.mistake or not self._skip):
            raise failure.error(client, self._round)
        self.failed[failure.kind] += 1
        words = f"round {self._round}: client {client} is left out ({failure.kind.replace('_', ' ')}): {failure.why}"
        if own and failure.why not in self._told:
            self._told.add(failure.why)
            words += f"\n{failure.trace}(shown once; training.on_error = 'stop' would end the run here)"
        log.warning(words)

    def _unfit(self, result: Result) -> Failure | None:
        """What is wrong with an answer."""
        message = result.message
        if message is None or result.memory is None:
            return Failure("invalid", "it sent nothing")
        if wrong := mismatch(message.signature, self._expected):
            return Failure("invalid", wrong)
        if message.client != result.client or not is_count(message.samples):
            return Failure("invalid", f"it claims to be client {message.client} with {message.samples} samples")
        if name := message.not_finite():
            return Failure("invalid", f"'{name}' has values that are not finite; a smaller learning rate may help")
        return None
