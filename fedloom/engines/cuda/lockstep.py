"""Which steps lanes take together: a plan for each of them becomes one order of pieces for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fedloom.core.batches import Plan


@dataclass(frozen=True)
class Piece:
    """Some steps of one size: of the first so many lanes in step, or of one lane alone."""

    lanes: range
    size: int
    count: int
    start: tuple[int, ...]
    """How many samples of its plan each of the lanes has taken before."""

    @property
    def together(self) -> bool:
        """Whether lanes go in step."""
        return len(self.lanes) > 1


def pieces(plans: Sequence[Plan]) -> list[Piece]:
    """Everybody's steps, each lane's in its own order.

    As long as all lanes that have steps left come to the same size they go in step. Before that, whoever comes to
    another (a remainder) takes it alone. Lanes are in step from the first on: a lane with more steps than one before it
    takes the last of them alone.
    """
    left = [[(size, len(list(run))) for size, run in groupby(plan.sizes)][::-1] for plan in plans]
    taken = [0] * len(plans)
    found: list[Piece] = []

    def take(lanes: range, count: int) -> None:
        size = left[lanes[0]][-1][0]
        found.append(Piece(lanes, size, count, tuple(taken[lane] for lane in lanes)))
        for lane in lanes:
            taken[lane] += size * count
            rest = left[lane].pop()[1] - count
            if rest:
                left[lane].append((size, rest))

    usual = Counter(size for plan in plans for size in plan.sizes).most_common(1)[0][0] if any(left) else 0
    while any(left):
        active = range(next((lane for lane, runs in enumerate(left) if not runs), len(left)))
        coming = {left[lane][-1][0] for lane in active}
        if len(active) > 1 and len(coming) == 1:
            take(active, min(left[lane][-1][1] for lane in active))
            continue
        alone = [lane for lane in active if left[lane][-1][0] != usual] if len(active) > 1 else range(len(left))
        for lane in [lane for lane in alone if left[lane]]:
            take(range(lane, lane + 1), left[lane][-1][1])
    return found


def samples(plans: Sequence[Plan], piece: Piece) -> np.ndarray:
    """int64 [count, lanes, batches, size]: what every step of a piece takes."""
    length = piece.size * piece.count
    rows = [plans[lane].index.numpy()[:, a : a + length] for lane, a in zip(piece.lanes, piece.start, strict=True)]
    return np.stack(rows).reshape(len(rows), -1, piece.count, piece.size).transpose(2, 0, 1, 3)
