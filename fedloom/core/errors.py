"""Errors that a user can mend: the command line prints them without a traceback and exits with 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake in what the user gave: the message names the field, the value and the remedy."""


class RunError(Exception):
    """A run that cannot go on, by nobody's mistake: the command line prints it without a traceback and exits with 1."""


def nearest(value: object, choices: Iterable[str]) -> str:
    """A sentence that offers the closest valid choice, then all of them.

    >>> nearest("fedavgg", ["fedavg", "local"])
    "did you mean 'fedavg'? (choices: fedavg, local)"
    """
    names = sorted(choices)
    close = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}(choices: {', '.join(names)})"
