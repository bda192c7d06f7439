"""What a method does with clients' messages, found out before anything runs: does it average all that it reads?"""

from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from fedloom.methods.base import Method

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


def use_of_messages(method: "Method") -> Use:
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
