"""The command line: one file per group of commands. torch is imported only by commands that need it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedloom.core.errors import RunError, UserError
from fedloom.core.signals import follow, follows

SAFE_PATH = "PYTHONSAFEPATH"


def main() -> None:
    """Run the command line; exit with code 2 after a user error and with 1 after a run that failed."""
    if follows():
        follow()
    from fedloom.cli.base import err, say
    from fedloom.cli.commands import app

    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        with _safe_children():
            app()
    except (UserError, RunError) as error:
        if debug:
            raise
        err.print("error:", style="bold red", end=" ")
        for line in (str(error), *getattr(error, "__notes__", [])):
            say(line, err)
        sys.exit(2 if isinstance(error, UserError) else 1)


@contextmanager
def _safe_children() -> Iterator[None]:
    """Keep worker processes from importing modules of the current folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
