"""Errors that a user can mend: the command line prints them without a traceback and exits with 2."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


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


def brief(error: BaseException) -> str:
    """An exception in one short line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 12, 12, 12
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 60, 200


def shown(value: Any) -> str:
    """A value for a message; a huge one in part (YAML can make one of a billion entries out of a few lines)."""
    return _SHORT.repr(value)
