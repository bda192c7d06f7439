"""A run's log file."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("fedloom")
HINTS = logging.getLogger("fedloom.engines")
"""Logger for choices of the engine and remarks about the network, which the command line displays."""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write warnings to a file, which is created at the first warning, and to stderr or the user's log handlers."""
    to_file = logging.FileHandler(path, delay=True, encoding="utf-8")
    to_file.setLevel(logging.WARNING)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if not LOGGER.hasHandlers():
        assert logging.lastResort is not None
        handlers.append(logging.lastResort)  # looks up sys.stderr at each record: a progress bar may have replaced it
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
        to_file.close()
