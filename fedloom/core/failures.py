"""What can go wrong with one client in one round, and the errors that end a run because of it."""

import traceback
from dataclasses import dataclass, field
from typing import Literal

from fedloom.core.errors import RunError, UserError

FailureKind = Literal["raised", "died", "timed_out", "invalid", "dropped"]
"""It raised; its process died; it was later than `engine.client_timeout`; what it sent cannot be used; it is silent."""


class InjectedError(RuntimeError):
    """Raised on purpose: the recipe's `faults` ask for it."""


class ClientError(RuntimeError):
    """A client's job failed somewhere else, in a worker process; the message has its traceback."""


class RoundError(RunError):
    """Too few clients answered in a round, also after it was retried with others."""


@dataclass(frozen=True)
class Failure:
    """Why a job has no result."""

    kind: FailureKind
    why: str
    """one line"""
    trace: str = ""
    """where it was raised"""
    injected: bool = False
    """by the recipe's `faults`: not a mistake of anyone's"""
    mistake: bool = False
    """it is the user's to mend: no traceback helps"""
    reported: bool = False
    """another party says so: its text came from there"""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """the exception itself, where it was raised in this process"""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """What a client raised."""
        return cls(
            "raised",
            f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            injected=isinstance(error, InjectedError),
            mistake=isinstance(error, UserError),
            cause=error,
        )

    def error(self, client: int, round: int) -> BaseException:
        """What to raise where a run cannot go on: the exception itself if it is at hand."""
        if self.cause is not None:
            return self.cause
        if self.mistake:
            return UserError(self.why.removeprefix("UserError: "))
        return ClientError(f"client {client} failed in round {round}:\n{self.trace or self.why}")
