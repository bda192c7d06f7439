"""Sizes of clients: whole numbers from shares, and at least the minimum number of samples for everyone."""

import heapq
from collections.abc import Callable

import numpy as np

from fedloom.data.partitions.base import Pool

REDRAWS = 100  # attempts to draw a division in which every client has the minimum number of samples


def cut(share: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers that add up to the size and whose expected values are size × share."""
    # Without the random offset the first client would lose half a sample of each class and the last would gain it.
    ends = np.floor(np.cumsum(share) / share.sum() * size + rng.random()).astype(np.int64)
    ends[-1] = size
    return np.diff(np.minimum(ends, size), prepend=0)


def draw_large_enough(pool: Pool, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Draw counts [·, clients] until every client has the minimum number of samples, at most REDRAWS times."""
    minimum = _attainable(pool)
    for _ in range(REDRAWS):
        counts = draw()
        short = int((counts.sum(0) < minimum).sum())
        # With over 30 clients below the minimum, a draw without any has a probability of about e^-30: stop early.
        if short == 0 or short > 30:
            break
    return counts


def top_up(pool: Pool, owner: np.ndarray) -> np.ndarray:
    """Move random samples, each from the client that is currently largest, to clients below the minimum."""
    minimum = _attainable(pool)
    sizes = np.bincount(owner, minlength=pool.clients)
    needs = np.maximum(minimum - sizes, 0)
    if not needs.any():
        return owner
    largest = [(-int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    gives = np.zeros(pool.clients, np.int64)
    for _ in range(int(needs.sum())):
        size, client = largest[0]
        heapq.heapreplace(largest, (size + 1, client))
        gives[client] += 1
    # Of each owner's samples in random order, the first `gives` are given away.
    order = pool.rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    given = order[rank < np.repeat(gives, sizes)]
    topped = owner.copy()
    topped[pool.rng.permutation(given)] = np.repeat(np.arange(pool.clients), needs)
    pool.notes.append(
        f"{int((needs > 0).sum())} of {pool.clients} clients were below {minimum} samples"
        f"{'' if minimum == pool.minimum else f' (there are too few samples for the minimum of {pool.minimum})'}: "
        f"{len(given)} samples were moved to them from the largest"
    )
    return topped


def _attainable(pool: Pool) -> int:
    # At most half the mean size, so that sizes stay uneven where there are too few samples for the minimum.
    return min(pool.minimum, max(1, len(pool.labels) // (2 * pool.clients)))
