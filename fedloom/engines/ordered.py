"""Keeps a bounded number of jobs in flight and returns their results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fedloom.core.job import Job, Result


class Pending(Protocol):
    """A submitted job."""

    def result(self) -> Result:
        """Waits for the result."""
        ...


def ordered(jobs: Iterable[Job], submit: Callable[[Job], Pending], window: int) -> Iterator[Result]:
    """Submits jobs ahead of the results that are read; yields the results in the order of the jobs.

    A job is taken from `jobs` just before it is submitted, so that a client's memory is loaded only when it is needed.
    If the caller stops early, or a job raises, submitted jobs are left as they are: the caller of `ordered` cancels
    them.

    Args:
        jobs: the jobs, preferably the longest first.
        submit: starts a job and returns without waiting for it.
        window: most jobs submitted and not yet read.
    """
    pending: deque[Pending] = deque()
    for job in jobs:
        pending.append(submit(job))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
