"""Whose turn it is to give the GPU work. Threads that cut in on each other at every operation slow each other down."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from time import perf_counter

LONG = 0.005
"""Seconds per job after which a turn was not only giving out work, but waiting for it as well."""
PATIENCE = 16
"""So many long turns of a kind, one after another, and that kind of work goes without turns from then on."""


class Turn:
    """One thread has it at a time, from the beginning of its work to the end, unless it steps aside to wait."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None
        self._since = 0.0
        self._long: Counter[str] = Counter()

    @contextmanager
    def of(self, kind: str, jobs: int = 1) -> Iterator[None]:
        """Has the turn for so many jobs, unless this kind is known to wait: others need not wait with it."""
        if self._long[kind] >= PATIENCE:
            yield
            return
        self._take()
        try:
            yield
        finally:
            if self._holder == get_ident():  # not after the end
                self._long[kind] = self._long[kind] + 1 if perf_counter() - self._since > LONG * jobs else 0
                self._give()

    def end(self) -> None:
        """If it is this thread's turn, it is over: a generator that nobody goes on with would keep it for ever."""
        if self._holder == get_ident():
            self._give()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Lets others go on for a while, if it is this thread's turn."""
        if self._holder != get_ident():
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._lock.acquire()
        self._holder, self._since = get_ident(), perf_counter()

    def _give(self) -> None:
        self._holder = None
        self._lock.release()
