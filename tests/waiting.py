"""Waiting for what other threads and processes do."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep


def until(happened: Callable[[], bool], seconds: float = 20, why: Callable[[], str] = str) -> None:
    """Wait until something has happened; after some seconds the test fails with the text of `why`."""
    end = monotonic() + seconds
    while not happened():
        assert monotonic() < end, why()
        sleep(0.01)


@contextmanager
def idle_process() -> Iterator[subprocess.Popen]:
    """A process that does nothing, in place of one of Flower's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
