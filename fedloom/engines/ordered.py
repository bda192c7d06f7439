"""Results in the order of their jobs, with a bound on how far work runs ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fedloom.core.job import Job, Result


class Pending(Protocol):
    """A job that has been submitted."""

    def result(self) -> Result:
        """Waits for the result."""
        ...


def ordered(jobs: Iterable[Job], submit: Callable[[Job], Pending], window: int) -> Iterator[Result]:
    """Submits jobs ahead, at most `window` unread at a time; yields their results in the order of the jobs."""
    pending: deque[Pending] = deque()
    for job in jobs:
        pending.append(submit(job))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
