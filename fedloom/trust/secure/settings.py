"""The recipe section `secure`, and which methods it supports. Does not import `cryptography`."""

import math
from fractions import Fraction
from typing import Literal

from pydantic import Field

from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.method import Method
from fedloom.trust.access import Averaging, averaging_of, use_of_messages
from fedloom.trust.secure.ring import FixedPoint

LEAST_MEMBERS = 3
"""Smallest number of clients in a sum. Of two clients, each could subtract its own message."""
RANGES = {32: 64.0, 64: 2.0**20}
"""Default of `range` by bits."""


class SecureSettings(Section):
    """The recipe section `secure`: the server gets only the sum of clients' messages."""

    threshold: float = Field(
        2 / 3,
        gt=0.5,
        le=1,
        description="share of a round's clients that must respond until its end; the others may drop out. At least "
        "three clients in any case",
    )
    bits: Literal[32, 64] = Field(
        64, description="bits of each masked number: 32 sends as many bytes as float32, 64 is more precise"
    )
    range: float | None = Field(
        None,
        gt=0,
        description="largest magnitude of a weighted value; larger values are refused. Default: 64 with 32 bits, "
        "1048576 with 64 bits",
    )

    @property
    def limit(self) -> float:
        """Largest magnitude of a value."""
        return RANGES[self.bits] if self.range is None else self.range

    def needed(self, members: int) -> int:
        """Return the number of `members` that must respond; more than half, so that no two disjoint groups suffice.

        >>> [SecureSettings().needed(members) for members in (3, 4, 6, 20)]
        [3, 3, 4, 14]
        """
        share = math.ceil(Fraction(self.threshold).limit_denominator(10**6) * members)
        return max(LEAST_MEMBERS, share, members // 2 + 1)

    def fixed_point(self, members: int) -> FixedPoint:
        """Return the representation of numbers in a sum over `members`."""
        return FixedPoint(self.bits, self.limit, members)


def unsummable(method: Method) -> str | None:
    """Return why secure aggregation cannot compute what a method's `combine` needs; None if it can."""
    if method.pooled:
        return "pools all data in one place: no client sends anything"
    if averaging_of(method) is not None:
        return None
    if use_of_messages(method) == "unknown":
        return "combines messages in a way that cannot be determined in advance, but clients must know what to add up"
    return "reads single clients' messages, but secure aggregation reveals only their sum"


def refuse_unsummable(method: Method) -> Averaging:
    """Return how a method averages.

    Raises:
        UserError: The method needs more than a sum of messages.
    """
    averaging = averaging_of(method)
    if (reason := unsummable(method)) is not None or averaging is None:
        raise UserError(
            f"secure: method.name = '{method.name}' {reason}; choose a method that supports secure aggregation (see "
            "`fedloom methods NAME`), or remove the secure section"
        )
    return averaging
