"""Flower as an engine: jobs go to the organisations they are about, and results come back in the order of the jobs."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from flwr.app import MessageType

from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import MessageError, is_count, refuse_unless
from fedloom.core.scores import Scores
from fedloom.core.state import State
from fedloom.core.workspace import Setup
from fedloom.deploy.fleet import Asked, Fleet, reported
from fedloom.engines import Engine, EngineSettings
from fedloom.experiment.logging import LOGGER

HEADER = 2**20
ROUND = "round"


class Flower(Engine):
    """An engine whose clients are organisations elsewhere: each has `timeout` seconds for an answer.

    Newcomers join between calls; where fewer than `needed` are left, they are waited for, `wait` seconds.
    What the experiment holds as a client's memory is only the number of the round that was accepted last: the memory
    itself never leaves the client.
    """

    name: ClassVar[str] = "flower"

    def __init__(
        self, setup: Setup, settings: EngineSettings, fleet: Fleet, *, needed: int, wait: float, timeout: float
    ):
        super().__init__(setup, settings)
        self.fleet, self.needed, self.wait, self.timeout = fleet, needed, wait, timeout
        self._limit = HEADER + 3 * sum(t.numel() * t.element_size() for t in self.server_workspace.sent.values())

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Sends everything, then takes answers one by one: Flower keeps those whose turn has not come."""
        self.fleet.wait_for(self.needed, self.needed, self.wait)
        asked = [(job, [self._send(part) for part in _parts(job)]) for job in jobs]
        for job, requests in asked:
            yield _together(job, [self._result(job, one) for one in requests])

    def _send(self, job: Job) -> Asked:
        client = job.clients[0] if job.kind == "global" else job.client
        accepted = None if job.memory is None else int(job.memory[ROUND])
        about = {"what": "job", "round": job.round, "accepted": accepted}
        kind = MessageType.TRAIN if job.kind == "update" else MessageType.EVALUATE
        return self.fleet.send(client, about, replace(job, memory=None).to_bytes(), kind, self.timeout)

    def _result(self, job: Job, asked: Asked) -> Result:
        answer = self.fleet.receive(asked, self._limit)
        if isinstance(answer, Failure):
            return Result(asked.client, error=answer)
        try:
            return self._checked(job, asked.client, Result.from_bytes(answer[1]))
        except MessageError as error:
            return Result(asked.client, error=Failure("invalid", str(error)))

    def _checked(self, job: Job, client: int, result: Result) -> Result:
        """An answer that says what was asked, and about nobody else; `ValidateResults` looks at its tensors."""
        if result.error is not None:
            return Result(client, error=reported(result.error))
        loss, seconds = result.loss, result.seconds
        refuse_unless(loss is None or isinstance(loss, float), "its loss is no number")
        refuse_unless(isinstance(seconds, (int, float)), "its seconds are no number")
        refuse_unless(result.memory is None and result.personal is None, "it sends what should stay with it")
        if job.kind == "update":
            refuse_unless(result.client == client and result.message is not None, f"it is no update of client {client}")
            assert result.message is not None
            said = len(self.fleet.train[client])
            refuse_unless(result.message.samples == said, f"it joined with {said} training samples")
            memory: State = {ROUND: torch.tensor(job.round)}
            return replace(result, memory=memory, scores=[])
        refuse_unless(len(result.scores) <= 1, "it has several scores")
        if not result.scores:
            LOGGER.info(f"round {job.round}: client {client} gives no answer to an evaluation")
        for scores in result.scores:
            _check_scores(scores, client, self.setup.task.classes)
            said = len(self.fleet.test[client])
            refuse_unless(sum(scores.total) == said, f"it joined with {said} test samples")
        return replace(result, message=None)


def _parts(job: Job) -> list[Job]:
    """A job about several clients' data is one for each of them."""
    return [replace(job, clients=(client,)) for client in job.clients] if job.kind == "global" else [job]


def _together(job: Job, results: list[Result]) -> Result:
    """The results of a job's parts as one; clients that did not answer are left out, unless none did."""
    if job.kind != "global":
        return results[0]
    for result in results:
        if result.error is not None:
            LOGGER.warning(f"round {job.round}: client {result.client} is not evaluated: {result.error.why}")
    there = [result for result in results if result.error is None]
    if not there:
        return results[0]
    return Result(
        client=-1, scores=[s for result in there for s in result.scores], seconds=max(r.seconds for r in there)
    )


def _check_scores(scores: Scores, client: int, classes: int) -> None:
    refuse_unless(scores.client == client, f"it scores client {scores.client!r:.20}, not {client}")
    for counts in (scores.right, scores.total):
        right = isinstance(counts, list) and len(counts) in (1, classes) and all(map(is_count, counts))
        refuse_unless(right, "its scores are no counts, one for each class or one for all")
    refuse_unless(len(scores.right) == len(scores.total), "its scores are not of the classes that it tested")
    refuse_unless(all(r <= t for r, t in zip(scores.right, scores.total, strict=True)), "more are right than tested")
    refuse_unless(scores.loss is None, "it sends the loss of an evaluation, which should stay with it")
