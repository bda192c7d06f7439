"""Schedule of a cohort: which steps its clients take next, vectorised where several are at steps of the same size."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.core.batches import Plan

SPARSE = 6
"""Steps are vectorised over rows of which at least one in SPARSE takes part; fewer clients take them individually."""


class Remaining:
    """The steps that a client has not taken yet."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._runs = [(size, count) for _, size, count in plan.runs()][::-1]
        self._taken = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def size(self) -> int:
        """Batch size of the next step."""
        return self._runs[-1][0]

    @property
    def count(self) -> int:
        """Number of next steps with this batch size."""
        return self._runs[-1][1]

    def take(self, count: int) -> np.ndarray:
        """Return the rows of the next steps, int64 [count, row], and advance."""
        size, left = self._runs.pop()
        rows = self.plan.part(self._taken, size, count)
        self._taken += count
        if left > count:
            self._runs.append((size, left - count))
        return rows

    def clear(self) -> None:
        """Drop the remaining steps."""
        self._runs.clear()


@dataclass(frozen=True)
class Piece:
    """Steps of one size, taken by several clients at once or by one client."""

    clients: tuple[int, ...]
    size: int
    count: int


def pieces(waiting: Mapping[int, Remaining], rows: int) -> list[Piece]:
    """Return the next steps of clients with remaining steps: one piece for several, or pieces of single clients.

    Clients at another batch size than most (a remainder) take those steps first, individually. Then all are at the same
    size, and their steps are vectorised up to the first client's end.

    Args:
        waiting: Remaining steps by the clients' rows.
        rows: Number of rows over which steps are vectorised.
    """
    usual = Counter(left.plan.sizes[0] for left in waiting.values()).most_common(1)[0][0]
    coming = {left.size for left in waiting.values()}
    odd = [row for row, left in waiting.items() if left.size != usual] if len(coming) > 1 else []
    if not odd and len(waiting) > 1 and SPARSE * len(waiting) >= rows:
        return [Piece(tuple(waiting), coming.pop(), min(left.count for left in waiting.values()))]
    return [Piece((row,), waiting[row].size, waiting[row].count) for row in odd or waiting]
