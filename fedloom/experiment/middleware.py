"""Middleware between the round and the engine: small classes that wrap an object with `run(jobs)`.

    ValidateResults(EncodeMessages(RecordMessages(engine)))

The ledger is innermost, so that it records messages in their transmitted form, including rejected ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedloom.core.compression import Codec
from fedloom.core.failures import NOT_FINITE, Failure
from fedloom.core.job import ENCODED, Job, Result, Runner
from fedloom.core.message import Message, MessageError, Signature, is_count, mismatch
from fedloom.core.workspace import Workspace
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import Purpose


class RecordMessages:
    """Records every message in the ledger, in its transmitted form, and counts the bytes sent to clients."""

    def __init__(self, engine: Runner, ledger: Ledger, purpose: Purpose = "training"):
        self._engine, self._ledger, self._purpose = engine, ledger, purpose
        self._round = 0
        self.sent = self.bytes_down = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield the engine's results unchanged."""
        for result in self._engine.run(self._record_jobs(jobs)):
            if result.message is not None:
                self._ledger.add("up", self._round, result.client, result.message, self._purpose)
            if result.error is not None and result.error.reported:
                self._ledger.add_error(self._round, result.client, result.error.why)
            for scores in result.scores:
                self._ledger.add_scores(self._round, scores)
            yield result

    def _record_jobs(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            self._round = job.round
            for client in job.clients or (job.client,):
                self._ledger.add("down", job.round, client, job.message, self._purpose)
                self.sent += 1
                self.bytes_down += job.message.nbytes
            yield job


class EncodeMessages:
    """Encodes messages to clients and decodes their replies; a reply that cannot be decoded becomes a failure."""

    def __init__(self, engine: Runner, codec: Codec, server: Workspace):
        self._engine, self._codec, self._server = engine, codec, server

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield results with decoded messages."""
        received: dict[int, Message] = {}
        for result in self._engine.run(self._encoding(jobs, received)):
            yield self._decoded(result, received.pop(result.client, None))

    def _encoding(self, jobs: Iterable[Job], received: dict[int, Message]) -> Iterator[Job]:
        plain = encoded = Message({})
        for job in jobs:
            if job.kind in ENCODED:
                if job.message is not plain:  # a round's clients usually get the same message: encode it once
                    plain, encoded = job.message, self._codec.encode_down(job.message)
                received[job.client] = encoded
                job = replace(job, message=encoded)
            yield job

    def _decoded(self, result: Result, received: Message | None) -> Result:
        if self._codec.up is None or result.message is None or received is None:
            return result
        try:
            start = self._codec.decode_down(received, self._server.initial)
            return replace(result, message=self._codec.decode_up(result.message, start, self._server.sent))
        except MessageError as error:
            return Result(result.client, error=Failure("invalid", str(error)))


class ValidateResults:
    """Turns results that cannot be combined into failures: unexpected tensors, NaN, a wrong client id."""

    def __init__(self, engine: Runner, expected: Signature):
        self._engine, self._expected = engine, expected

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield results whose messages can be combined, and failures."""
        for result in self._engine.run(jobs):
            wrong = None if result.error else self._problem(result)
            yield result if wrong is None else Result(result.client, error=Failure("invalid", wrong))

    def _problem(self, result: Result) -> str | None:
        message = result.message
        if message is None or result.memory is None:
            return "it sent no message"
        if wrong := mismatch(message.signature, self._expected):
            return wrong
        if message.client != result.client or not is_count(message.samples):
            return f"it claims to be client {message.client} with {message.samples} samples"
        if name := message.not_finite():
            since = (
                "" if result.diverged is None else f"; its loss was not finite from training step {result.diverged} on"
            )
            return f"'{name}' {NOT_FINITE}{since}"
        return None
