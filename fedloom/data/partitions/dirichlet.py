"""Partitions by class, in proportions drawn from a Dirichlet distribution."""

import numpy as np

from fedloom.core.options import Positive
from fedloom.data.partitions.base import Pool, partition
from fedloom.data.partitions.minimum import cut, draw_large_enough, top_up


@partition()
def dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """Divide each class among clients in proportions drawn from Dir(alpha) (Hsu et al., arXiv:1909.06335, 2019)."""
    return _class_by_class(pool, alpha, cap=len(pool.classes))


@partition()
def capped_dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """Divide as `dirichlet`, except that a client with an even share of samples gets nothing of the remaining classes.

    Used by Yurochkin et al. (ICML 2019), MOON, NIID-Bench and PFLlib. Compared with `dirichlet`, the sizes of clients
    differ less and their labels more.
    """
    return _class_by_class(pool, alpha, cap=len(pool.classes) / pool.clients)


def _class_by_class(pool: Pool, alpha: float, cap: float) -> np.ndarray:
    """Divide each class in turn by shares drawn from Dir(alpha), among clients that hold fewer samples than the cap."""
    classes, sizes = np.unique(pool.classes, return_counts=True)

    def draw() -> np.ndarray:
        counts = np.zeros((len(classes), pool.clients), np.int64)
        for number, share in enumerate(pool.rng.dirichlet(np.full(pool.clients, alpha), len(classes))):
            open_ = counts.sum(0) < cap
            share = share * open_
            # If all shares have underflowed to 0, divide evenly among the clients below the cap.
            counts[number] = cut(share if share.sum() > 0 else open_.astype(float), sizes[number], pool.rng)
        return counts

    counts = draw_large_enough(pool, draw)
    owner = np.empty(len(pool.classes), np.int64)
    for label, count in zip(classes, counts, strict=True):
        members = pool.rng.permutation(np.flatnonzero(pool.classes == label))
        owner[members] = np.repeat(np.arange(pool.clients), count)
    return top_up(pool, owner)


@partition()
def equal_dirichlet(pool: Pool, *, beta: Positive) -> np.ndarray:
    """Give all clients equally many samples, in class proportions drawn from Dir(beta) for each client.

    Clients draw from the remaining samples one after another. Where a class has run out, the proportions are
    renormalised over the classes that still have samples.
    """
    classes, left = np.unique(pool.classes, return_counts=True)
    stock = [pool.rng.permutation(np.flatnonzero(pool.classes == label)) for label in classes]
    shares = pool.rng.dirichlet(np.full(len(classes), beta), pool.clients)
    owner = np.full(len(pool.classes), -1)
    for client, share in enumerate(shares):
        wanted = len(pool.classes) // pool.clients
        while wanted:
            share = share * (left > 0)
            # If all proportions have underflowed to 0, use those of the remaining samples.
            share = share / share.sum() if share.sum() > 0 else left / left.sum()
            taken = np.minimum(pool.rng.multinomial(wanted, share), left)
            for c in np.flatnonzero(taken):
                owner[stock[c][left[c] - taken[c] : left[c]]] = client
            left = left - taken
            wanted -= int(taken.sum())
    return owner
