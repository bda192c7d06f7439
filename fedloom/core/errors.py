"""Error classes that the command line prints without a traceback, and helpers for their messages."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(Exception):
    """Invalid user input. The message names the field, the value and the remedy; the exit code is 2."""


class MissingDataError(UserError):
    """Files of a shipped dataset that are not in the data folder."""


class RunError(Exception):
    """A run that cannot continue although its input was valid. The exit code is 1."""


def nearest(value: object, choices: Iterable[str]) -> str:
    """Return a hint with a valid choice that is nearly the same, if there is one, followed by all choices.

    >>> nearest("fedavgg", ["fedavg", "local"])
    "did you mean 'fedavg'? (choices: fedavg, local)"
    >>> nearest("mine", ["fedavg", "local"])
    'choose one of fedavg, local'
    """
    names = sorted(choices)
    # one of two letters may differ, but a longer word must share more: 'rotate' is not meant as 'jitter' (0.5)
    close = get_close_matches(str(value), names, n=1, cutoff=0.5 if len(str(value)) <= 3 else 0.6)
    listed = ", ".join(names)
    return f"did you mean '{close[0]}'? (choices: {listed})" if close else f"choose one of {listed}"


def brief(error: BaseException) -> str:
    """Return an exception's message as one short line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def printable(text: str) -> str:
    """Escape control characters: text from untrusted files could use them to hide or change output."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 12, 12, 12
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 60, 200


def shown(value: Any) -> str:
    """Return a shortened `repr` in one line for messages: a few lines of YAML can expand to a billion entries."""
    text = _SHORT.repr(value)
    return " ".join(text.split()) if "\n" in text else text
