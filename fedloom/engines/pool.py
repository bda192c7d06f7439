"""A pool of worker processes: distributes jobs and replaces workers that die or take too long."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import ClassVar, Generic, TypeVar

from fedloom.core.errors import RunError
from fedloom.core.failures import Failure
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.engines.base import Engine, EngineSettings, per_round
from fedloom.engines.ordered import ordered

AHEAD = 4
"""Submitted and unread jobs per job that the workers can run concurrently."""
TRIES = 3
"""Maximum attempts at a job whose workers are lost, and maximum consecutive workers that die before their first job."""
NO_MESSAGE = Message({})
"""Placeholder in a job for a message that its worker already has or receives separately."""


class WorkerError(RunError):
    """Workers cannot be kept alive."""


class WorkerLostError(Exception):
    """A worker died or does not respond. `injected`: caused on purpose by the recipe's `faults` section."""

    def __init__(self, why: str, injected: bool = False):
        super().__init__(why)
        self.injected = injected


@dataclass(eq=False)
class Task:
    """A submitted job."""

    job: Job
    wait: Callable[[], None]
    """Waits until a worker reports something."""
    tries: int = 0
    alone: bool = False
    """Whether the job is sent on its own, because a worker was lost that ran it together with others."""
    outcome: Result | None = None

    def result(self) -> Result:
        """Wait for the result and return it."""
        while self.outcome is None:
            self.wait()
        return self.outcome

    def fail(self, failure: Failure) -> None:
        """Set a failure as the result."""
        self.outcome = Result(self.job.client, error=failure)


@dataclass(kw_only=True, eq=False)
class Worker:
    """A worker process."""

    ready: bool = False
    """Whether the worker has started; its start does not count towards timeouts."""
    tasks: list[Task] = field(default_factory=list)
    """Jobs that were sent to the worker and have no result yet."""
    deadline: float | None = None

    @property
    def late(self) -> bool:
        """Whether the worker's current client has exceeded its time limit."""
        return self.deadline is not None and monotonic() > self.deadline


W = TypeVar("W", bound=Worker)


class WorkerPool(Engine, Generic[W]):
    """Base class of engines whose clients run in worker processes. Subclasses start workers and talk to them."""

    can_stop_clients: ClassVar[bool] = True
    retries_updates: ClassVar[bool]
    """Whether an update that was lost with its worker is repeated on another worker. Evaluations always are."""
    size: int
    """Number of workers to keep."""
    batch: int = 1
    """Number of jobs sent to a worker at a time."""

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self._workers: list[W] = []
        self._queue: deque[Task] = deque()
        self._failed_starts = 0

    def share(self, jobs: int) -> int:
        """Return the number of jobs to send at a time: this many, but at most a worker's share of a round."""
        return max(1, min(jobs, -(-per_round(self.setup) // self.size)))

    @abstractmethod
    def _start(self) -> W:
        """Start a worker. Its first report says that it is ready."""

    def _accepts(self, worker: W, job: Job) -> bool:
        """Return whether a worker can be sent this job now."""
        return worker.ready and not worker.tasks

    @abstractmethod
    def _send(self, worker: W, jobs: list[Job]) -> None:
        """Send jobs to a worker.

        Raises:
            WorkerLostError: The jobs cannot be sent.
        """

    @abstractmethod
    def _poll(self, timeout: float | None) -> Iterable[W]:
        """Wait for reports and return the workers that have one."""

    @abstractmethod
    def _receive(self, worker: W) -> list[Result]:
        """Return a worker's report: the results of its jobs, or an empty list if it has just started.

        Raises:
            WorkerLostError: The worker died.
        """

    @abstractmethod
    def _kill(self, worker: W) -> None:
        """End a worker, busy or not."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run the jobs on the workers and yield results in the order of the jobs."""
        try:
            yield from ordered(jobs, self.submit, window=AHEAD * self.batch * self.size)
        finally:
            self.cancel()

    def submit(self, job: Job) -> Task:
        """Queue a job, and send it if a worker is idle."""
        task = Task(job, self._wait)
        self._queue.append(task)
        self._take_reports(timeout=0)
        if len(self._queue) >= self.batch:
            self._hand_out()
        return task

    def cancel(self) -> None:
        """Drop all jobs and replace busy workers."""
        self._queue.clear()
        for worker in [worker for worker in self._workers if worker.tasks]:
            self._remove(worker)

    def _wait(self) -> None:
        self._hand_out()
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        self._take_reports(timeout=max(0.0, min(deadlines) - monotonic()) if deadlines else None)
        self._hand_out()

    def _fill(self) -> None:
        while len(self._workers) < self.size:
            self._workers.append(self._start())

    def _hand_out(self) -> None:
        """Send queued jobs to workers, idle ones first."""
        self._fill()
        for worker in sorted(self._workers, key=lambda worker: len(worker.tasks)):
            if not self._queue or not self._accepts(worker, self._queue[0].job):
                continue
            tasks = self._next_tasks()
            limit = self.settings.client_timeout if tasks[0].job.kind == "update" else None
            try:
                self._send(worker, [task.job for task in tasks])
            except WorkerLostError:  # the jobs were not started, so this does not count as an attempt
                self._queue.extendleft(reversed(tasks))
                if not worker.tasks:  # a busy worker may have sent a result before it died
                    self._remove(worker)
                continue
            worker.tasks += tasks
            worker.deadline = monotonic() + limit if limit else None

    def _next_tasks(self) -> list[Task]:
        """Remove the next tasks to send to a worker from the queue."""
        tasks = [self._queue.popleft()]
        while self._queue and len(tasks) < self.batch and not (tasks[0].alone or self._queue[0].alone):
            tasks.append(self._queue.popleft())
        return tasks

    def _take_reports(self, timeout: float | None) -> None:
        """Process reports of workers, and replace workers that are lost or late."""
        for worker in self._poll(timeout):
            try:
                results = self._receive(worker)
            except WorkerLostError as lost:
                self._lose(worker, lost)
                continue
            if not worker.ready:
                worker.ready, self._failed_starts = True, 0
                continue
            for result in results:
                worker.tasks.pop(0).outcome = result
            worker.deadline = None
        for worker in [worker for worker in self._workers if worker.late]:
            self._lose(worker, WorkerLostError("late"))

    def _lose(self, worker: W, lost: WorkerLostError) -> None:
        """Replace a worker. Its jobs return to the front of the queue, or fail.

        Jobs that ran together are repeated one by one: only one of their clients is likely to be the cause.
        """
        self._remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= TRIES:
                raise WorkerError(
                    f"engine.name = '{self.name}': {TRIES} workers died before their first job ({lost}); "
                    "use engine.name = 'inline' to see the error"
                )
        begun, waiting = worker.tasks[: self.batch], worker.tasks[self.batch :]
        self._queue.extendleft(reversed(waiting))
        for task in reversed(begun):
            if len(begun) > 1:
                task.alone = True
                self._queue.appendleft(task)
                continue
            task.tries += 1
            if worker.late:
                limit = f"engine.client_timeout = {self.settings.client_timeout:g} s"
                task.fail(Failure("timed_out", f"no result within {limit}; its worker was replaced"))
            elif task.tries < TRIES and (self.retries_updates or task.job.kind != "update"):
                self._queue.appendleft(task)
            else:
                why = f"its worker process died ({lost}) and was replaced"
                if task.tries > 1:
                    why = f"{task.tries} workers died while running it, the last one: {lost}"
                task.fail(Failure("died", why, injected=lost.injected))

    def _remove(self, worker: W) -> None:
        self._workers.remove(worker)
        self._kill(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in list(self._workers):
            self._remove(worker)
        super().close()


def portable(result: Result) -> Result:
    """Return the result without objects of the worker's process: the exception, and a loss on its device."""
    error = None if result.error is None else replace(result.error, cause=None)
    return replace(result, error=error, loss=None if result.loss is None else float(result.loss))
