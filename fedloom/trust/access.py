"""Restricted access to messages in a method's `combine` when a robust rule or privacy replaces the mean."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn

from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method


class SealedMessages(Iterator[Message]):
    """Messages that only `server.average` can read; any other code that reads one gets a UserError (`refusal`)."""

    def __init__(self, messages: Iterator[Message], refusal: str):
        self._messages, self._refusal = messages, refusal

    def __next__(self) -> Message:
        raise UserError(self._refusal)

    def open(self) -> Iterator[Message]:
        """Return the messages, for the rule that replaces the mean."""
        return self._messages


def opened(messages: Iterable[Message]) -> Iterable[Message]:
    """Return the messages inside `SealedMessages`; other messages are returned unchanged."""
    return messages.open() if isinstance(messages, SealedMessages) else messages


Use = Literal["averages", "adds up", "reads", "unknown"]
"""How a method's `combine` uses messages, see `use_of_messages`."""


class _AveragesError(Exception):
    """Ends the trial call of `combine` at the point where it averages."""

    def __init__(self, messages: Any, use: Use):
        self.messages, self.use = messages, use


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
        raise _AveragesError(messages, "adds up" if sums or (by and by != "uniform") else "averages")


def use_of_messages(method: Method) -> Use:
    """Find out how a method's `combine` uses messages, by calling it with stand-ins for the server and the messages.

    Returns:
        `averages` if `combine` passes the messages to `server.average` and reads none directly; `adds up` if it does so
        with `sums` or row weights; `reads` if it reads single messages; `unknown` if it first uses something else of
        the server, or raises.
    """
    messages: Any = _Messages()
    server: Any = _Server()
    try:
        method.combine(server, messages)
    except _AveragesError as found:
        return found.use if found.messages is messages else "reads"
    except _ReadsError:
        return "reads"
    except Exception:
        return "unknown"
    return "averages"
