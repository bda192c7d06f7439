"""Flower as an engine: each job goes to its organisation, and results are returned in the order of the jobs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from flwr.app import MessageType

from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import MessageError, is_count, refuse_unless
from fedloom.core.scores import Scores
from fedloom.core.setup import Setup
from fedloom.core.state import State
from fedloom.deploy.fleet import Fleet, PendingRequest, reported
from fedloom.engines import Engine, EngineSettings
from fedloom.experiment.logging import LOGGER
from fedloom.trust.secure.protocol import Stage

HEADER = 2**20
ROUND = "round"


class Flower(Engine):
    """Engine whose clients are remote organisations.

    Organisations can join between calls of `run`. The experiment stores as a client's memory only the number of the
    last accepted round; the memory itself never leaves the client.

    Args:
        setup: Task, method, training and seed of the experiment.
        settings: Engine settings.
        fleet: The organisations.
        needed: Smallest number of organisations for a round.
        wait: Seconds to wait if fewer organisations have joined.
        timeout: Seconds that an organisation has for an answer.
    """

    name: ClassVar[str] = "flower"

    def __init__(
        self, setup: Setup, settings: EngineSettings, fleet: Fleet, *, needed: int, wait: float, timeout: float
    ):
        super().__init__(setup, settings)
        self.fleet, self.needed, self.wait, self.timeout = fleet, needed, wait, timeout
        self._shares: dict[int, str] = {}
        self._limit = HEADER + 3 * sum(t.numel() * t.element_size() for t in self.server_workspace.sent.values())

    @property
    def scope(self) -> tuple[str, str]:
        """Name of the run, and hash of the recipe."""
        return self.fleet.scope

    def ask(self, stage: Stage, round: int, requests: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Send requests of secure aggregation to organisations, and return their answers."""
        if stage == "keys":  # the first request of a round
            self.fleet.wait_for(self.fleet.least, self.fleet.least, self.wait)
        about = {"what": "secure", "stage": stage, "round": round}
        asked = [self.fleet.send(c, about, body, MessageType.QUERY, self.timeout) for c, body in requests.items()]
        return {one.client: self._answer(one) for one in asked}

    def _answer(self, asked: PendingRequest) -> bytes | Failure:
        answer = self.fleet.receive(asked, HEADER)
        if isinstance(answer, Failure):
            return answer
        try:
            if answer[0].get("what") == "result" and (failure := Result.from_bytes(answer[1]).error):
                return self.fleet.noted(asked.client, answer[0], reported(failure))
            refuse_unless(answer[0].get("what") == "secure", "it does not answer a request of secure aggregation")
        except MessageError as error:
            return Failure("invalid", str(error))
        return answer[1]

    def relay(self, client: int, body: bytes) -> None:
        """Send shares of secure aggregation with the organisation's next training job."""
        self._shares[client] = body.decode()

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Send all jobs, then receive the results one by one; Flower stores results that arrive earlier."""
        self.fleet.wait_for(self.needed, self.needed, self.wait)
        asked = [(job, [self._send(part) for part in _parts(job)]) for job in jobs]
        for job, requests in asked:
            yield _together(job, [self._result(job, one) for one in requests])

    def _send(self, job: Job) -> PendingRequest:
        client = job.clients[0] if job.kind == "global" else job.client
        accepted = None if job.memory is None else int(job.memory[ROUND])
        about: dict[str, Any] = {"what": "job", "round": job.round, "accepted": accepted}
        if job.kind == "update" and client in self._shares:
            about["secure"] = self._shares.pop(client)
        kind = MessageType.TRAIN if job.kind == "update" else MessageType.EVALUATE
        return self.fleet.send(client, about, replace(job, memory=None).to_bytes(), kind, self.timeout)

    def _result(self, job: Job, asked: PendingRequest) -> Result:
        answer = self.fleet.receive(asked, self._limit)
        if isinstance(answer, Failure):
            return Result(asked.client, error=answer)
        try:
            result = self._checked(job, asked.client, Result.from_bytes(answer[1]))
        except MessageError as error:
            return Result(asked.client, error=Failure("invalid", str(error)))
        if result.error is not None:
            self.fleet.noted(asked.client, answer[0], result.error)
        return result

    def _checked(self, job: Job, client: int, result: Result) -> Result:
        """Check that a result matches its job and client; `ValidateResults` checks its tensors."""
        if result.error is not None:
            return Result(client, error=reported(result.error))
        loss, seconds = result.loss, result.seconds
        refuse_unless(loss is None or isinstance(loss, float), "its loss is not a number")
        refuse_unless(isinstance(seconds, (int, float)), "its seconds are not a number")
        refuse_unless(result.memory is None and result.personal is None, "it contains state that must stay private")
        refuse_unless(not result.validation, "it has scores on validation samples, which no deployment asks for")
        if job.kind == "update":
            is_update = result.client == client and result.message is not None
            refuse_unless(is_update, f"it is not an update of client {client}")
            assert result.message is not None
            declared = len(self.fleet.train[client])
            refuse_unless(
                result.message.samples == declared, f"the organisation joined with {declared} training samples"
            )
            memory: State = {ROUND: torch.tensor(job.round)}
            return replace(result, memory=memory, scores=[])
        refuse_unless(len(result.scores) <= 1, "it has more than one set of scores")
        if not result.scores:
            LOGGER.info(f"round {job.round}: client {client} did not share an evaluation result")
        for scores in result.scores:
            _check_scores(scores, client, self.setup.task.classes, self.fleet.recipe.evaluation.wanted)
            declared = len(self.fleet.test[client])
            refuse_unless(sum(scores.total) == declared, f"the organisation joined with {declared} test samples")
        return replace(result, message=None)


def _parts(job: Job) -> list[Job]:
    """Split a job about the data of several clients into one job per client."""
    return [replace(job, clients=(client,)) for client in job.clients] if job.kind == "global" else [job]


def _together(job: Job, results: list[Result]) -> Result:
    """Merge the results of a job's parts; clients without a result are left out, unless no client has one."""
    if job.kind != "global":
        return results[0]
    for result in results:
        if result.error is not None:
            LOGGER.warning(f"round {job.round}: client {result.client} was not evaluated: {result.error.why}")
    answered = [result for result in results if result.error is None]
    if not answered:
        return results[0]
    return Result(
        client=-1, scores=[s for result in answered for s in result.scores], seconds=max(r.seconds for r in answered)
    )


def _check_scores(scores: Scores, client: int, classes: int, wanted: Sequence[str] = ()) -> None:
    refuse_unless(scores.client == client, f"its scores are for client {scores.client!r:.20}, not {client}")
    for counts in (scores.right, scores.total):
        right = isinstance(counts, list) and len(counts) in (1, classes) and all(map(is_count, counts))
        refuse_unless(right, "its scores are not counts, one per class or one for all classes")
    refuse_unless(len(scores.right) == len(scores.total), "its scores do not match the tested classes")
    fewer = all(r <= t for r, t in zip(scores.right, scores.total, strict=True))
    refuse_unless(fewer, "its scores have more correct predictions than test samples")
    for name, value in scores.metrics.items():
        refuse_unless(name in wanted, f"it contains the figure {name!r:.30}, which the recipe does not ask for")
        refuse_unless(value is None or 0 <= value <= 1, f"its figure {name} is not between 0 and 1")
    if scores.loss is not None:
        refuse_unless("loss" in wanted, "it contains the loss of an evaluation, which the recipe does not ask for")
        refuse_unless(0 <= scores.loss < math.inf, "the loss of its evaluation is not a number from 0")
