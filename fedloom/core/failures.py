"""Failures of one client in one round, and the errors that end a run because of them."""

import traceback
from dataclasses import dataclass, field
from typing import Literal

from fedloom.core.errors import RunError, UserError

FailureKind = Literal["raised", "died", "timed_out", "invalid", "dropped"]
"""Kinds of failures.

- `raised`: the client's code raised an exception.
- `died`: the client's process died.
- `timed_out`: the client exceeded `engine.client_timeout`.
- `invalid`: the client's message cannot be used.
- `dropped`: the client did not respond.
"""


NOT_FINITE = "has values that are not finite"
"""Part of the description of an `invalid` failure whose message has NaN or infinite values."""
CAUSES = (
    "likely causes: a learning rate that is too large (training.optimizer.lr), gradients that grow without bound "
    "(training.optimizer.clip limits them), or inputs that are not normalised or not finite (data.normalise)"
)
"""Why training diverges, and what to change."""


class InjectedError(RuntimeError):
    """An error raised on purpose by the recipe's `faults` section."""


class ClientError(RuntimeError):
    """A client's job failed in another process; the message contains the traceback."""


class RoundError(RunError):
    """Too few clients responded in a round, even after retries with other clients."""


class DivergedError(RoundError):
    """Training diverged: resumed, the run would diverge again."""


@dataclass(frozen=True)
class Failure:
    """The reason why a job has no result."""

    kind: FailureKind
    why: str
    """One-line description."""
    trace: str = ""
    """Traceback of the exception, if any."""
    injected: bool = False
    """Whether the recipe's `faults` section caused it on purpose."""
    mistake: bool = False
    """Whether it is a `UserError`, for which no traceback is shown."""
    reported: bool = False
    """Whether the text was received from another organisation."""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception, if it was raised in this process."""

    @property
    def refusal(self) -> bool:
        """Whether another organisation refused, and says why."""
        return self.reported and self.kind == "dropped"

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure that describes an exception raised by a client."""
        return cls(
            "raised",
            f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            injected=isinstance(error, InjectedError),
            mistake=isinstance(error, UserError),
            cause=error,
        )

    def error(self, client: int, round: int) -> BaseException:
        """Return the exception that ends the run: the original exception if it is available."""
        if self.cause is not None:
            return self.cause
        if self.mistake:
            return UserError(self.why.removeprefix("UserError: "))
        return ClientError(f"client {client} failed in round {round}:\n{self.trace or self.why}")
