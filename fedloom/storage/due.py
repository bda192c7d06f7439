"""When a checkpoint is due."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

SHARE = 20
"""Checkpoints that are due by the clock take no more than one part in so many of the time."""


class Due:
    """Every so many rounds, and earlier where rounds are long: when the last one is so many seconds old."""

    def __init__(self, rounds: int, seconds: float):
        self._rounds, self._seconds = rounds, seconds
        self._since, self._took = perf_counter(), 0.0

    def __call__(self, round: int) -> bool:
        """Whether one is, after this round."""
        if not self._rounds:
            return False
        late = perf_counter() - self._since >= max(self._seconds, SHARE * self._took)
        return round % self._rounds == 0 or (late and self._seconds > 0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writing of one."""
        start = perf_counter()
        yield
        self._since = perf_counter()
        self._took = self._since - start
