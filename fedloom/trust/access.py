"""What a method's `combine` may do with messages where a robust rule or privacy replaces the mean."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn

from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method


class SealedMessages(Iterator[Message]):
    """Messages that `server.average` may open; anything else that reads one gets the `refusal`."""

    def __init__(self, messages: Iterator[Message], refusal: str):
        self._messages, self._refusal = messages, refusal

    def __next__(self) -> Message:
        raise UserError(self._refusal)

    def open(self) -> Iterator[Message]:
        """For what stands in for the mean."""
        return self._messages


def opened(messages: Iterable[Message]) -> Iterable[Message]:
    """Messages that can be read, whether they were sealed or not."""
    return messages.open() if isinstance(messages, SealedMessages) else messages


Use = Literal["averages", "adds up", "reads", "unknown"]


class _AveragesError(Exception):
    """Ends the rehearsal where `combine` averages."""

    def __init__(self, messages: Any, use: Use):
        self.messages, self.use = messages, use


class _ReadsError(Exception):
    """Ends it where `combine` reads a message itself."""


class _Messages:
    def __iter__(self) -> "_Messages":
        return self

    def __next__(self) -> NoReturn:
        raise _ReadsError


class _Server:
    def move(self, *_: Any) -> NoReturn:
        raise AttributeError("moved before anything was averaged")

    def average(self, messages: Any, parts: Any = None, *, by: Any = None, sums: tuple[str, ...] = ()) -> NoReturn:
        raise _AveragesError(messages, "adds up" if sums or (by and by != "uniform") else "averages")


def use_of_messages(method: Method) -> Use:
    """How a method's `combine` treats messages.

    `averages`: it hands them to `server.average` and reads none itself; `adds up`: so too, with `sums` or row weights;
    `reads`: it looks at single messages; `unknown`: it asks the server for something else first, or fails.
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
