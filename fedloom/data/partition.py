"""Who gets which sample: named ways of dividing labels among clients, written `name` or `name:value`.

Each is a function of a `Pool` and its values that gives every sample's owner (−1: nobody's).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import isfunction

import numpy as np

from fedloom.core.errors import UserError, nearest
from fedloom.core.options import Count, Positive, declared, validated
from fedloom.core.registry import Registry

REDRAWS = 100


@dataclass(frozen=True)
class Pool:
    """What there is to divide."""

    labels: np.ndarray
    """int64 [N]"""
    clients: int
    rng: np.random.Generator
    groups: np.ndarray | None = None
    """int64 [N], for divisions by domain"""
    minimum: int = 1
    """samples that random sizes must leave every client"""
    notes: list[str] = field(default_factory=list)
    """what was done that the user should know; divisions add to it"""


Divide = Callable[..., np.ndarray]
PARTITIONS: Registry[Divide] = Registry(
    "data.partition", "a function of a fedloom.data.Pool and its values that gives every sample's owner", isfunction,
    package="fedloom.data", group="fedloom.partitions",
)  # fmt: skip


@dataclass(frozen=True)
class Partition:
    """A division with its values: call it with a pool for a list of positions per client."""

    spec: str
    divide: Divide
    values: tuple[float, ...]

    @property
    def by_group(self) -> bool:
        """Whether a client's samples are all of one group."""
        return self.divide in (domain, natural)

    def __call__(self, pool: Pool) -> list[np.ndarray]:
        """Positions into the pool per client, ascending; each position at most once."""
        if pool.clients < 1:
            raise UserError(f"clients: {pool.clients} is too few, there must be at least 1")
        clients = self._count(pool)
        if clients > len(pool.labels):
            raise UserError(
                f"clients: {clients} clients cannot share {len(pool.labels)} samples; "
                f"use {len(pool.labels)} clients or fewer"
            )
        if clients != pool.clients:
            pool.notes.append(f"partition '{self.spec}' makes {clients} clients (not {pool.clients})")
        names = declared(self.divide)
        owner = np.asarray(self.divide(replace(pool, clients=clients), **dict(zip(names, self.values, strict=False))))
        if owner.dtype.kind != "i" or owner.shape != pool.labels.shape or owner.max() >= clients:
            raise UserError(
                f"data.partition = '{self.spec}': it gave {owner.dtype} {list(owner.shape)}; it must give every one of "
                f"{len(pool.labels)} samples a client, a whole number below {clients}, or -1 for none"
            )
        if unused := int((owner < 0).sum()):
            pool.notes.append(f"partition '{self.spec}' leaves {unused} of {len(owner)} samples unused")
        order = np.argsort(owner, kind="stable")[unused:]
        ends = np.cumsum(np.bincount(owner[order], minlength=clients))
        return np.split(order, ends[:-1])

    def _count(self, pool: Pool) -> int:
        if not self.by_group:
            return pool.clients
        groups = len(np.unique(_grouped(pool)))
        if self.divide is natural:
            return groups
        if self.values:
            return groups * int(self.values[0])
        if pool.clients % groups:
            raise UserError(
                f"partition 'domain': {pool.clients} clients cannot be spread evenly over {groups} domains; "
                f"use a multiple of {groups}, or domain:{max(1, pool.clients // groups)}"
            )
        return pool.clients


def parse_partition(spec: str) -> Partition:
    """`dirichlet:0.1` → the division and its values, checked against what the division takes.

    >>> parse_partition("domain:5:0.5").values
    (5, 0.5)
    """
    file, colon, rest = spec.rpartition(".py:")
    first, *texts = rest.split(":")
    name = file + colon + first
    said = f"partition '{spec}':"
    if (divide := PARTITIONS.look_up(name)) is None:
        choice = nearest(name, PARTITIONS.names())
        raise UserError(f"{said} '{name}' is unknown: {choice}, or one of yours: path/to/file.py:name")
    values = declared(divide)
    needed = [value for value, (_, default) in values.items() if default is ...]
    form = ":".join([name, *(value if value in needed else f"[{value}]" for value in values)])
    if not len(needed) <= len(texts) <= len(values):
        raise UserError(f"{said} it is written {form}, with {len(texts)} value(s) given")
    try:
        read = validated(values, dict(zip(values, texts, strict=False)), "", name)
    except UserError as error:
        raise UserError(f"{said} {'; '.join(str(error).splitlines())}") from None
    return Partition(spec, divide, tuple(read.values()))


def _partition(function: Divide) -> Divide:
    """Registers a division under its name; its values are the keywords after the pool."""
    return PARTITIONS.add(function.__name__.replace("_", "-"), function)


@_partition
def iid(pool: Pool) -> np.ndarray:
    """At random, in sizes that differ by one at most."""
    return pool.rng.permutation(np.arange(len(pool.labels)) % pool.clients)


@_partition
def dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """Each class is cut by its own proportions over clients ~ Dir(alpha) (Hsu et al., 2019)."""
    return _class_by_class(pool, alpha, cap=len(pool.labels))


@_partition
def capped_dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """As `dirichlet`, but a client that holds an even share already gets nothing of the classes that follow.

    The division of Yurochkin et al. (2019) that MOON, NIID-Bench and PFLlib use: sizes differ less, labels more.
    """
    return _class_by_class(pool, alpha, cap=len(pool.labels) / pool.clients)


@_partition
def quantity(pool: Pool, *, beta: Positive) -> np.ndarray:
    """Sizes ~ Dir(beta), labels at random (Li et al., 2022)."""

    def draw() -> np.ndarray:
        return _cut(pool.rng.dirichlet(np.full(pool.clients, beta)), len(pool.labels), pool.rng)[None]

    sizes = _draw_large_enough(pool, draw)[0]
    owner = np.empty(len(pool.labels), np.int64)
    owner[pool.rng.permutation(len(owner))] = np.repeat(np.arange(pool.clients), sizes)
    return _top_up(pool, owner)


@_partition
def equal_dirichlet(pool: Pool, *, beta: Positive) -> np.ndarray:
    """All clients equally large; each draws class proportions ~ Dir(beta) and fills itself from what is left.

    Where a class has run out, the proportions are renormalised over the classes that still have samples.
    """
    classes, left = np.unique(pool.labels, return_counts=True)
    stock = [pool.rng.permutation(np.flatnonzero(pool.labels == label)) for label in classes]
    shares = pool.rng.dirichlet(np.full(len(classes), beta), pool.clients)
    owner = np.full(len(pool.labels), -1)
    for client, share in enumerate(shares):
        wanted = len(pool.labels) // pool.clients
        while wanted:
            share = share * (left > 0)
            # A share that has underflowed to 0 everywhere says nothing: then whatever is left is as good.
            share = share / share.sum() if share.sum() > 0 else left / left.sum()
            taken = np.minimum(pool.rng.multinomial(wanted, share), left)
            for c in np.flatnonzero(taken):
                owner[stock[c][left[c] - taken[c] : left[c]]] = client
            left = left - taken
            wanted -= int(taken.sum())
    return owner


@_partition
def pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Each client holds exactly that many classes; each class is split evenly among its holders.

    Every class has as many holders as any other, give or take one.
    """
    return _by_holders(pool, "pathological", classes, lambda size, holders: np.arange(size) % holders)


@_partition
def uneven_pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """As `pathological`, but the holders of a class get portions of random sizes, as in PFLlib.

    All but one get between a tenth of an even portion and a whole one (and at least the minimum number of samples over
    the number of their classes); the last gets what is left.
    """

    def uneven(size: int, holders: int) -> np.ndarray:
        even = size / holders
        least = int(min(max(even / 10, pool.minimum / classes), even))
        drawn = pool.rng.integers(least, max(least, int(even) - 1), holders - 1, endpoint=True)
        return np.repeat(np.arange(holders), [*drawn, size - drawn.sum()])

    return _by_holders(pool, "uneven-pathological", classes, uneven)


def _by_holders(pool: Pool, name: str, classes: int, deal: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Gives each client that many classes; `deal(samples, holders)` says which holder gets each sample of a class."""
    labels = np.unique(pool.labels)
    if classes > len(labels):
        raise UserError(f"partition '{name}:{classes}': there are only {len(labels)} classes")
    held = np.zeros(len(labels), np.int64)
    holders: list[list[int]] = [[] for _ in labels]
    for client, luck in enumerate(pool.rng.random((pool.clients, len(labels)))):
        for c in np.argsort(held + luck)[:classes]:  # luck < 1 decides only between equally held classes
            held[c] += 1
            holders[c].append(client)
    owner = np.full(len(pool.labels), -1)
    for label, clients in zip(labels, holders, strict=True):
        members = pool.rng.permutation(np.flatnonzero(pool.labels == label))
        if len(members) < len(clients):
            raise UserError(
                f"partition '{name}:{classes}': class {label} has {len(members)} samples for "
                f"{len(clients)} clients that should hold it; use fewer than {pool.clients} clients"
            )
        if clients:
            owner[members] = pool.rng.permutation(clients)[deal(len(members), len(clients))]
    return owner


@_partition
def shards(pool: Pool, *, each: Count) -> np.ndarray:
    """Sorted by label and cut into clients × each equal shards, dealt at random (McMahan et al., 2017)."""
    count = pool.clients * each
    if count > len(pool.labels):
        raise UserError(f"partition 'shards:{each}': {count} shards cannot be cut from {len(pool.labels)} samples")
    shuffled = pool.rng.permutation(len(pool.labels))
    by_label = shuffled[np.argsort(pool.labels[shuffled], kind="stable")]
    dealt = pool.rng.permutation(count) % pool.clients
    owner = np.empty(len(pool.labels), np.int64)
    owner[by_label] = dealt[np.arange(len(owner)) * count // len(owner)]
    return owner


@_partition
def domain(pool: Pool, *, each: Count = 0, beta: Positive = 0.0) -> np.ndarray:
    """That many clients for each domain, with samples at random, or with equal Dirichlet(beta) inside it."""
    domains = np.unique(_grouped(pool))
    owner = np.empty(len(pool.labels), np.int64)
    each = each or pool.clients // len(domains)
    for index, group in enumerate(domains):
        members = np.flatnonzero(pool.groups == group)
        if len(members) < each:
            raise UserError(f"partition 'domain:{each}': domain {group} has only {len(members)} samples")
        inner = replace(pool, labels=pool.labels[members], clients=each, groups=None)
        local = equal_dirichlet(inner, beta=beta) if beta else iid(inner)
        owner[members] = np.where(local < 0, -1, index * each + local)
    return owner


@_partition
def natural(pool: Pool) -> np.ndarray:
    """One client per group: the number of clients follows from the data."""
    return np.unique(_grouped(pool), return_inverse=True)[1].astype(np.int64)


def _grouped(pool: Pool) -> np.ndarray:
    if pool.groups is None:
        raise UserError("partitions 'domain' and 'natural' need data with groups: styles, or clients as folders")
    return pool.groups


def _class_by_class(pool: Pool, alpha: float, cap: float) -> np.ndarray:
    """Cuts one class after another by shares ~ Dir(alpha) of those clients that hold less than the cap."""
    classes, sizes = np.unique(pool.labels, return_counts=True)

    def draw() -> np.ndarray:
        counts = np.zeros((len(classes), pool.clients), np.int64)
        for number, share in enumerate(pool.rng.dirichlet(np.full(pool.clients, alpha), len(classes))):
            open_ = counts.sum(0) < cap
            share = share * open_
            # Shares that have underflowed to 0 everywhere say nothing: then all who may get some get as much.
            counts[number] = _cut(share if share.sum() > 0 else open_.astype(float), sizes[number], pool.rng)
        return counts

    counts = _draw_large_enough(pool, draw)
    owner = np.empty(len(pool.labels), np.int64)
    for label, count in zip(classes, counts, strict=True):
        members = pool.rng.permutation(np.flatnonzero(pool.labels == label))
        owner[members] = np.repeat(np.arange(pool.clients), count)
    return _top_up(pool, owner)


def _cut(share: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers that add up to the size and are size × share on average."""
    # Without the random offset the first client would lose half a sample of each class, and the last gain it.
    ends = np.floor(np.cumsum(share) / share.sum() * size + rng.random()).astype(np.int64)
    ends[-1] = size
    return np.diff(np.minimum(ends, size), prepend=0)


def _draw_large_enough(pool: Pool, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Draws counts [·, clients] until every client has the minimum, or REDRAWS times."""
    minimum = _attainable(pool)
    for _ in range(REDRAWS):
        counts = draw()
        short = int((counts.sum(0) < minimum).sum())
        # Where 30 are short, the odds that a draw has none are about e^-30: large federations would draw in vain.
        if short == 0 or short > 30:
            break
    return counts


def _attainable(pool: Pool) -> int:
    # Half the mean, so that sizes stay uneven where the minimum asked for is more than there is.
    return min(pool.minimum, max(1, len(pool.labels) // (2 * pool.clients)))


def _top_up(pool: Pool, owner: np.ndarray) -> np.ndarray:
    """Gives clients below the minimum random samples of the client that is largest at the moment."""
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
    # In random order, a sample is given away if it is among the first `gives` of its owner's.
    order = pool.rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    given = order[rank < np.repeat(gives, sizes)]
    topped = owner.copy()
    topped[pool.rng.permutation(given)] = np.repeat(np.arange(pool.clients), needs)
    pool.notes.append(
        f"{int((needs > 0).sum())} of {pool.clients} clients were below {minimum} samples"
        f"{'' if minimum == pool.minimum else f' (the minimum of {pool.minimum} is out of reach)'}: "
        f"{len(given)} samples were moved to them from the largest"
    )
    return topped
