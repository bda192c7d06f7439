"""A run's log: what went wrong and was got over, in its folder and on stderr."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("fedloom")


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Warnings go to this file (made at the first of them) and to stderr, or where the user has logging go."""
    to_file = logging.FileHandler(path, delay=True, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if not LOGGER.hasHandlers():
        assert logging.lastResort is not None
        handlers.append(logging.lastResort)  # asks for sys.stderr each time: a progress bar may have taken its place
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
        to_file.close()
