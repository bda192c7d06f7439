"""Fixed-point numbers in the integers modulo 2**bits, whose sums cannot overflow."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.message import MessageError

Ring = NDArray[np.uint32] | NDArray[np.uint64]
"""Elements of the ring; numpy's arithmetic on them wraps."""
_TYPES: dict[int, tuple[np.dtype[Any], np.dtype[Any]]] = {
    32: (np.dtype("<u4"), np.dtype("<i4")),
    64: (np.dtype("<u8"), np.dtype("<i8")),
}


class FixedPoint:
    """Multiples of a step as elements of a ring, such that the sum of all members' values does not wrap.

    Args:
        bits: Bits of an element, 32 or 64.
        limit: Largest magnitude of a value.
        members: Largest number of values in a sum.

    Attributes:
        step: Distance of neighbouring values; a power of two, so that scaling does not round.
    """

    def __init__(self, bits: int, limit: float, members: int):
        self.bits, self.limit, self.members = bits, limit, members
        self.unsigned, self._signed = _TYPES[bits]
        exact, half = Fraction(limit), Fraction(1, 2)
        power = math.floor(math.log2(limit)) + math.floor(math.log2(members)) - bits
        while members * (exact / Fraction(2) ** power + half) >= 2 ** (bits - 1):
            power += 1
        self.step = 2.0**power

    def encode(self, values: NDArray[np.float64], name: str) -> Ring:
        """Round values to multiples of the step.

        Args:
            values: The values.
            name: What they are, for the error message.

        Raises:
            MessageError: A value is not finite or beyond the range. Its size is not part of the text, which is sent.
        """
        if values.size and not np.abs(values).max() <= self.limit:  # NaN compares as False
            raise MessageError(
                f"the message is refused: '{name}' has values beyond ±{self.limit:g}, which secure aggregation cannot "
                "represent; raise secure.range or lower training.optimizer.lr"
            )
        return np.rint(values / self.step).astype(self._signed).view(self.unsigned)

    def decode(self, total: Ring) -> NDArray[np.float64]:
        """Return the values of a sum of encoded values."""
        return total.view(self._signed) * self.step

    def error(self, members: int) -> float:
        """Return the largest error of a sum over `members` values: half a step for each."""
        return members * self.step / 2
