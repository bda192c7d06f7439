"""Partitions that draw samples at random, whatever their classes."""

import numpy as np

from fedloom.core.options import Positive
from fedloom.data.partitions.base import Pool, partition
from fedloom.data.partitions.minimum import cut, draw_large_enough, top_up


@partition()
def iid(pool: Pool) -> np.ndarray:
    """Divide the samples at random, in sizes that differ by at most one."""
    return pool.rng.permutation(np.arange(len(pool.labels)) % pool.clients)


@partition()
def quantity(pool: Pool, *, beta: Positive) -> np.ndarray:
    """Divide the samples at random, in sizes drawn from Dir(beta) (Li et al., ICDE 2022)."""

    def draw() -> np.ndarray:
        return cut(pool.rng.dirichlet(np.full(pool.clients, beta)), len(pool.labels), pool.rng)[None]

    sizes = draw_large_enough(pool, draw)[0]
    owner = np.empty(len(pool.labels), np.int64)
    owner[pool.rng.permutation(len(owner))] = np.repeat(np.arange(pool.clients), sizes)
    return top_up(pool, owner)
