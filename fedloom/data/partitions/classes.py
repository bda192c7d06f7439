"""Partitions that give each client a few classes."""

from collections.abc import Callable

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.options import Count
from fedloom.data.partitions.base import Pool, partition


@partition()
def pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Give each client exactly `classes` classes, and divide each class evenly among its clients.

    The numbers of clients per class differ by at most one.
    """
    return _by_holders(pool, classes, lambda size, holders: np.arange(size) % holders)


@partition()
def uneven_pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Divide as `pathological`, except that the clients of a class get portions of random sizes.

    All but one client of a class get between a tenth of an even portion and a whole one, and at least the minimum
    number of samples divided by `classes`. The last client gets the remaining samples.
    """
    return _by_holders(pool, classes, lambda size, holders: _uneven(pool, classes, size, holders))


@partition()
def grouped_pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Divide as PFLlib: groups of clients hold the same `classes` classes, in portions of random sizes.

    The portions are those of `uneven-pathological`, except that the last client of a group gets the remaining samples
    of all classes. With 20 clients and 10 of 100 classes, clients 0 and 1 hold the first ten classes, and so on.
    """
    labels = _labels(pool, classes)
    most = -(-pool.clients * classes // len(labels))
    left, owner = np.full(pool.clients, classes), np.full(len(pool.classes), -1)
    for label in labels:
        clients = np.flatnonzero(left)[:most]
        if len(clients):
            members = _members(pool, label, len(clients))
            owner[members] = clients[_uneven(pool, classes, len(members), len(clients))]
            left[clients] -= 1
    return owner


def _uneven(pool: Pool, classes: int, size: int, holders: int) -> np.ndarray:
    """Return the holder of each sample of a class, in portions of random sizes."""
    even = size / holders
    least = int(min(max(even / 10, pool.minimum / classes), even))
    drawn = pool.rng.integers(least, max(least, int(even) - 1), holders - 1, endpoint=True)
    return np.repeat(np.arange(holders), [*drawn, size - drawn.sum()])


def _by_holders(pool: Pool, classes: int, deal: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Assign classes to clients; `deal(samples, holders)` returns the holder of each sample of a class."""
    labels = _labels(pool, classes)
    held = np.zeros(len(labels), np.int64)
    holders: list[list[int]] = [[] for _ in labels]
    for client, luck in enumerate(pool.rng.random((pool.clients, len(labels)))):
        for c in np.argsort(held + luck)[:classes]:  # luck < 1 only breaks ties between classes
            held[c] += 1
            holders[c].append(client)
    owner = np.full(len(pool.classes), -1)
    for label, clients in zip(labels, holders, strict=True):
        members = _members(pool, label, len(clients))
        if clients:
            owner[members] = pool.rng.permutation(clients)[deal(len(members), len(clients))]
    return owner


def _labels(pool: Pool, classes: int) -> np.ndarray:
    """Return the classes of the data, of which there must be at least `classes`."""
    labels = np.unique(pool.classes)
    if classes > len(labels):
        raise UserError(f"partition '{pool.spec}': there are only {len(labels)} classes in the data")
    return labels


def _members(pool: Pool, label: int, holders: int) -> np.ndarray:
    """Return the samples of a class in random order, of which there must be one for each holder."""
    members = pool.rng.permutation(np.flatnonzero(pool.classes == label))
    if len(members) < holders:
        raise UserError(
            f"partition '{pool.spec}': class {label} has {len(members)} samples for "
            f"{holders} clients that should hold it; use fewer than {pool.clients} clients"
        )
    return members


@partition()
def shards(pool: Pool, *, each: Count) -> np.ndarray:
    """Sort by label, cut into clients × each equal shards, and deal them at random (McMahan et al., AISTATS 2017)."""
    count = pool.clients * each
    if count > len(pool.classes):
        raise UserError(
            f"partition '{pool.spec}': {count} shards cannot be cut from {len(pool.classes)} samples; use fewer "
            "clients or shards"
        )
    shuffled = pool.rng.permutation(len(pool.classes))
    by_label = shuffled[np.argsort(pool.classes[shuffled], kind="stable")]
    dealt = pool.rng.permutation(count) % pool.clients
    owner = np.empty(len(pool.classes), np.int64)
    owner[by_label] = dealt[np.arange(len(owner)) * count // len(owner)]
    return owner
