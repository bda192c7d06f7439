"""Keep a bounded number of jobs in flight and return their results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fedloom.core.job import Job, Result


class Pending(Protocol):
    """A submitted job."""

    def result(self) -> Result:
        """Wait for the result and return it."""
        ...


def ordered(jobs: Iterable[Job], submit: Callable[[Job], Pending], window: int) -> Iterator[Result]:
    """Submit jobs ahead of reading results; yield the results in the order of the jobs.

    A job is taken from `jobs` just before it is submitted, so that a client's memory is loaded only when it is needed.
    If the consumer stops early or a job raises, submitted jobs are not cancelled: the caller must do that.

    Args:
        jobs: The jobs, preferably the longest first.
        submit: Starts a job and returns without waiting for it.
        window: Maximum number of jobs that are submitted and not yet read.
    """
    pending: deque[Pending] = deque()
    for job in jobs:
        pending.append(submit(job))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
