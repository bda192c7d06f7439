"""Restricted access to messages in a method's `combine` when a robust rule or privacy replaces the mean."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.state import as_paths


class RestrictedMessages(Iterator[Message]):
    """Messages that only `server.average` can read; any other code that reads one gets a UserError (`refusal`).

    Attributes:
        readable: The messages, for the rule that replaces the mean.
    """

    def __init__(self, messages: Iterator[Message], refusal: str):
        self.readable, self._refusal = messages, refusal

    def __next__(self) -> Message:
        raise UserError(self._refusal)


def readable(messages: Iterable[Message]) -> Iterable[Message]:
    """Return the messages inside `RestrictedMessages`; other messages are returned unchanged."""
    return messages.readable if isinstance(messages, RestrictedMessages) else messages


Use = Literal["averages", "adds up", "reads", "unknown"]
"""How a method's `combine` uses messages, see `use_of_messages`."""


@dataclass(frozen=True)
class Averaging:
    """The arguments with which a method's `combine` calls `server.average`."""

    parts: tuple[str, ...] | None
    """Parts that are averaged; None: all."""
    rows: Mapping[str, str]
    """By part with row weights: the name of the tensor that holds its weights."""
    sums: tuple[str, ...]
    """Parts that are summed."""
    uniform: bool
    """Whether all clients have equal weight, instead of their numbers of samples."""

    @property
    def plain(self) -> bool:
        """Whether it is a mean, without sums and row weights."""
        return not self.sums and not self.rows


class _AveragesError(Exception):
    """Ends the trial call of `combine` at the point where it averages."""

    def __init__(self, messages: Any, averaging: Averaging):
        self.messages, self.averaging = messages, averaging


class _ReadsError(Exception):
    """Ends the trial call of `combine` at the point where it reads a message directly."""


class _Messages:
    def __iter__(self) -> "_Messages":
        return self

    def __next__(self) -> NoReturn:
        raise _ReadsError


class _Server:
    def move(self, *_: Any) -> NoReturn:
        raise AttributeError("combine called server.move before server.average")

    def average(self, messages: Any, parts: Any = None, *, by: Any = None, sums: tuple[str, ...] = ()) -> NoReturn:
        rows = {} if by is None or by == "uniform" else dict(by)
        paths = None if parts is None else as_paths(parts)
        raise _AveragesError(messages, Averaging(paths, rows, tuple(sums), uniform=by == "uniform"))


def use_of_messages(method: Method) -> Use:
    """Find out how a method's `combine` uses messages, by calling it with stand-ins for the server and the messages.

    Returns:
        `averages` if `combine` passes the messages to `server.average` and reads none directly; `adds up` if it does so
        with `sums` or row weights; `reads` if it reads single messages; `unknown` if it first uses something else of
        the server, or raises.
    """
    found = _rehearsed(method)
    if isinstance(found, Averaging):
        return "averages" if found.plain else "adds up"
    return found


def averaging_of(method: Method) -> Averaging | None:
    """Return how a method's `combine` averages; None if it reads single messages, or if this cannot be determined."""
    found = _rehearsed(method)
    return found if isinstance(found, Averaging) else None


def _rehearsed(method: Method) -> Averaging | Use:
    messages: Any = _Messages()
    server: Any = _Server()
    try:
        method.combine(server, messages)
    except _AveragesError as found:
        return found.averaging if found.messages is messages else "reads"
    except _ReadsError:
        return "reads"
    except Exception:
        return "unknown"
    return "averages"
