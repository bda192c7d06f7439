"""Partitions: named ways to divide samples among clients, written `name` or `name:value:…`.

A partition is a function of a `Pool` that returns the client of each sample, int64 [N], or −1 for samples that no
client gets. Its keyword-only parameters are the values after the name, in order; annotations validate them. Use one of
your own by its path, `path/to/file.py:function`, or register it with `PARTITIONS.add(name, function)`.

Example:
    def one_large(pool: Pool, *, share: float) -> np.ndarray:  # data.partition: mine.py:one_large:0.5
        rest = pool.rng.integers(1, pool.clients, len(pool.labels))
        return np.where(pool.rng.random(len(rest)) < share, 0, rest)
"""

from fedloom.data.partitions.base import PARTITIONS, Partition, Pool, parse_partition

__all__ = ["PARTITIONS", "Partition", "Pool", "parse_partition"]
