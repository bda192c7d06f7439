"""What engines with workers elsewhere have in common: who gets which job when, and results in their turn."""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from fedloom.core.errors import RunError
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.workspace import Setup
from fedloom.engines.base import Engine, EngineSettings

AHEAD = 4
"""Jobs per worker that may be given out before the result whose turn it is."""
TRIES = 3
"""How often a job is given out that is not to blame for the workers that are lost with it; and how often workers may
die before one is ready for its first job."""

Given = tuple[int, Job]
"""A job and its turn."""


class WorkerError(RunError):
    """Workers cannot be kept alive."""


@dataclass(kw_only=True)
class PoolWorker:
    """A worker, as the crew sees it."""

    ready: bool = False
    """once it has said so: time before that is nobody's fault"""
    batch: list[Given] = field(default_factory=list)
    """what it works on"""
    deadline: float | None = None


M = TypeVar("M", bound=PoolWorker)


class Crew(Engine, Generic[M]):
    """Idle workers take the next jobs. A job that a lost worker leaves behind goes to another, at the front."""

    batch: int = 1
    """Jobs that a worker takes at once."""
    _count: int
    """How many workers there should be."""

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self._workers: list[M] = []
        self._stillborn = 0
        self._again: deque[Given] = deque()
        self._tries: Counter[int] = Counter()

    @abstractmethod
    def _fill(self) -> None:
        """As many workers as there should be."""

    @abstractmethod
    def _give(self, worker: M, batch: list[Given]) -> bool:
        """Hands jobs to an idle worker; False if it is gone, and the jobs were not begun."""

    @abstractmethod
    def _news(self) -> dict[int, Result]:
        """Waits for workers; results and failures by turn."""

    @abstractmethod
    def _dismiss(self, worker: M) -> object:
        """Ends a worker, whatever it does."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results wait until their turn comes, a bounded number of them."""
        waiting = enumerate(jobs)
        self._again.clear()
        self._tries.clear()
        done: dict[int, Result] = {}
        turn = 0
        try:
            while True:
                self._fill()
                self._give_out(waiting, before=turn + AHEAD * self.batch * self._count)
                self._look_ahead(waiting)
                if not self._again and not any(worker.batch for worker in self._workers):
                    return
                done |= self._news()
                while turn in done:
                    yield done.pop(turn)
                    turn += 1
        finally:  # whoever stops listening must not leave jobs to the next round
            for worker in [w for w in self._workers if w.batch]:
                self._dismiss(worker)

    def _give_out(self, waiting: Iterator[Given], before: int) -> None:
        """Hands jobs to idle workers, unless there are none or their turns are too far ahead."""
        for worker in [w for w in self._workers if not w.batch and w.ready]:
            batch: list[Given] = []
            while len(batch) < self.batch:
                self._look_ahead(waiting)
                if not self._again or self._again[0][0] >= before:
                    break
                batch.append(self._again.popleft())
            if not batch:
                return
            if not self._give(worker, batch):
                self._again.extendleft(reversed(batch))

    def _look_ahead(self, waiting: Iterator[Given]) -> None:
        if not self._again and (item := next(waiting, None)) is not None:
            self._again.append(item)

    def _retried(self, turn: int, job: Job) -> bool:
        """Gives a job back to be done by another worker, unless that was tried often enough."""
        self._tries[turn] += 1
        if self._tries[turn] >= TRIES:
            return False
        self._again.appendleft((turn, job))
        return True

    def _deadline(self, job: Job) -> float | None:
        """When a client's time is over, if it is given to a worker now."""
        limit = self.settings.client_timeout
        return monotonic() + limit if limit and job.kind == "update" else None

    def _late(self, worker: M) -> dict[int, Result]:
        """Ends a worker whose client takes too long."""
        ((turn, job),) = worker.batch
        self._dismiss(worker)
        why = f"no answer within engine.client_timeout = {self.settings.client_timeout:g} s; its worker is replaced"
        return {turn: Result(job.client, error=Failure("timed_out", why))}

    def _note_stillborn(self, why: str) -> None:
        """One more worker died before its first job; too many in a row end the run."""
        self._stillborn += 1
        if self._stillborn >= TRIES:
            raise WorkerError(
                f"engine.name = '{self.name}': {TRIES} workers died before their first job ({why}); "
                "use engine.name = 'inline' to see what happens"
            )
