"""Partitions: named ways to divide samples among clients, written `name` or `name:value:…`.

A partition is a function of a `Pool` that returns the client of each sample, int64 [N], or −1 for samples that no
client gets. Its keyword-only parameters are the values after the name, in order; annotations validate them. Use one of
your own by its path, `path/to/file.py:function`, or register it with `PARTITIONS.add(name, function)`.

Example:
    def one_large(pool: Pool, *, share: float) -> np.ndarray:  # data.partition: mine.py:one_large:0.5
        rest = pool.rng.integers(1, pool.clients, len(pool.labels))
        return np.where(pool.rng.random(len(rest)) < share, 0, rest)
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import isfunction

import numpy as np

from fedloom.core.errors import UserError, nearest
from fedloom.core.options import Count, Positive, declared, validated
from fedloom.core.registry import Registry

REDRAWS = 100  # attempts to draw a division in which every client has the minimum number of samples


@dataclass(frozen=True)
class Pool:
    """Samples to divide among clients: the input of a partition."""

    labels: np.ndarray
    """Label of each sample, int64 [N]."""
    clients: int
    """Number of clients."""
    rng: np.random.Generator
    """Generator for all random choices."""
    groups: np.ndarray | None = None
    """Group (domain, style or natural client) of each sample, int64 [N]; None if the dataset has no groups."""
    minimum: int = 1
    """Minimum number of samples per client, for partitions with random sizes."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user; partitions append to it."""


Divide = Callable[..., np.ndarray]
PARTITIONS: Registry[Divide] = Registry(
    "data.partition", "a function of a fedloom.data.Pool that returns the client of each sample", isfunction,
    package="fedloom.data", group="fedloom.partitions",
)  # fmt: skip


@dataclass(frozen=True)
class Partition:
    """A partition function with its values. Call it with a pool for the positions of each client's samples."""

    spec: str
    """The partition as written: `dirichlet:0.1`."""
    divide: Divide
    """The function."""
    values: tuple[float, ...]
    """Its values: (0.1,)."""

    @property
    def by_group(self) -> bool:
        """Whether all samples of a client belong to one group."""
        return self.divide in (domain, natural)

    def __call__(self, pool: Pool) -> list[np.ndarray]:
        """Divide a pool among clients.

        Args:
            pool: The samples. `pool.notes` gets a message if samples are unused or the number of clients changes.

        Returns:
            Positions of each client's samples in the pool, ascending; each position occurs at most once.

        Raises:
            UserError: The samples cannot be divided this way, or the function returns an invalid result.
        """
        if pool.clients < 1:
            raise UserError(f"clients: {pool.clients} is too few; there must be at least 1")
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
                f"data.partition = '{self.spec}': the function returned {owner.dtype} {list(owner.shape)}; it must "
                f"return one integer for each of {len(pool.labels)} samples: a client below {clients}, or -1 for none"
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
    """Parse a partition such as `dirichlet:0.1` and validate its values.

    Args:
        spec: `name` or `name:value:…`, where the name may be `path/to/file.py:function`.

    Returns:
        The partition.

    Raises:
        UserError: The name is unknown, or values are missing, superfluous or invalid.

    Example:
        >>> parse_partition("domain:5:0.5").values
        (5, 0.5)
    """
    file, colon, rest = spec.rpartition(".py:")
    first, *texts = rest.split(":")
    name = file + colon + first
    prefix = f"partition '{spec}':"
    if (divide := PARTITIONS.look_up(name)) is None:
        choice = nearest(name, PARTITIONS.names())
        raise UserError(f"{prefix} '{name}' is unknown: {choice}, or a function of yours: path/to/file.py:name")
    values = declared(divide)
    needed = [value for value, (_, default) in values.items() if default is ...]
    form = ":".join([name, *(value if value in needed else f"[{value}]" for value in values)])
    if not len(needed) <= len(texts) <= len(values):
        raise UserError(f"{prefix} has {len(texts)} value(s); write it as {form}")
    try:
        read = validated(values, dict(zip(values, texts, strict=False)), "", name)
    except UserError as error:
        raise UserError(f"{prefix} {'; '.join(str(error).splitlines())}") from None
    return Partition(spec, divide, tuple(read.values()))


def _partition(function: Divide) -> Divide:
    """Register a partition under its function name; its values are the keyword-only parameters."""
    return PARTITIONS.add(function.__name__.replace("_", "-"), function)


@_partition
def iid(pool: Pool) -> np.ndarray:
    """Divide the samples at random, in sizes that differ by at most one."""
    return pool.rng.permutation(np.arange(len(pool.labels)) % pool.clients)


@_partition
def dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """Divide each class among clients in proportions drawn from Dir(alpha) (Hsu et al., arXiv:1909.06335, 2019)."""
    return _class_by_class(pool, alpha, cap=len(pool.labels))


@_partition
def capped_dirichlet(pool: Pool, *, alpha: Positive) -> np.ndarray:
    """Divide as `dirichlet`, except that a client with an even share of samples gets nothing of the remaining classes.

    Used by Yurochkin et al. (ICML 2019), MOON, NIID-Bench and PFLlib. Compared with `dirichlet`, the sizes of clients
    differ less and their labels more.
    """
    return _class_by_class(pool, alpha, cap=len(pool.labels) / pool.clients)


@_partition
def quantity(pool: Pool, *, beta: Positive) -> np.ndarray:
    """Divide the samples at random, in sizes drawn from Dir(beta) (Li et al., ICDE 2022)."""

    def draw() -> np.ndarray:
        return _cut(pool.rng.dirichlet(np.full(pool.clients, beta)), len(pool.labels), pool.rng)[None]

    sizes = _draw_large_enough(pool, draw)[0]
    owner = np.empty(len(pool.labels), np.int64)
    owner[pool.rng.permutation(len(owner))] = np.repeat(np.arange(pool.clients), sizes)
    return _top_up(pool, owner)


@_partition
def equal_dirichlet(pool: Pool, *, beta: Positive) -> np.ndarray:
    """Give all clients equally many samples, in class proportions drawn from Dir(beta) for each client.

    Clients draw from the remaining samples one after another. Where a class has run out, the proportions are
    renormalised over the classes that still have samples.
    """
    classes, left = np.unique(pool.labels, return_counts=True)
    stock = [pool.rng.permutation(np.flatnonzero(pool.labels == label)) for label in classes]
    shares = pool.rng.dirichlet(np.full(len(classes), beta), pool.clients)
    owner = np.full(len(pool.labels), -1)
    for client, share in enumerate(shares):
        wanted = len(pool.labels) // pool.clients
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


@_partition
def pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Give each client exactly `classes` classes, and divide each class evenly among its clients.

    The numbers of clients per class differ by at most one.
    """
    return _by_holders(pool, "pathological", classes, lambda size, holders: np.arange(size) % holders)


@_partition
def uneven_pathological(pool: Pool, *, classes: Count) -> np.ndarray:
    """Divide as `pathological`, except that the clients of a class get portions of random sizes, as in PFLlib.

    All but one client of a class get between a tenth of an even portion and a whole one, and at least the minimum
    number of samples divided by `classes`. The last client gets the remaining samples.
    """

    def uneven(size: int, holders: int) -> np.ndarray:
        even = size / holders
        least = int(min(max(even / 10, pool.minimum / classes), even))
        drawn = pool.rng.integers(least, max(least, int(even) - 1), holders - 1, endpoint=True)
        return np.repeat(np.arange(holders), [*drawn, size - drawn.sum()])

    return _by_holders(pool, "uneven-pathological", classes, uneven)


def _by_holders(pool: Pool, name: str, classes: int, deal: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Assign classes to clients; `deal(samples, holders)` returns the holder of each sample of a class."""
    labels = np.unique(pool.labels)
    if classes > len(labels):
        raise UserError(f"partition '{name}:{classes}': there are only {len(labels)} classes in the data")
    held = np.zeros(len(labels), np.int64)
    holders: list[list[int]] = [[] for _ in labels]
    for client, luck in enumerate(pool.rng.random((pool.clients, len(labels)))):
        for c in np.argsort(held + luck)[:classes]:  # luck < 1 only breaks ties between classes
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
    """Sort by label, cut into clients × each equal shards, and deal them at random (McMahan et al., AISTATS 2017)."""
    count = pool.clients * each
    if count > len(pool.labels):
        raise UserError(
            f"partition 'shards:{each}': {count} shards cannot be cut from {len(pool.labels)} samples; use fewer "
            "clients or shards"
        )
    shuffled = pool.rng.permutation(len(pool.labels))
    by_label = shuffled[np.argsort(pool.labels[shuffled], kind="stable")]
    dealt = pool.rng.permutation(count) % pool.clients
    owner = np.empty(len(pool.labels), np.int64)
    owner[by_label] = dealt[np.arange(len(owner)) * count // len(owner)]
    return owner


@_partition
def domain(pool: Pool, *, each: Count = 0, beta: Positive = 0.0) -> np.ndarray:
    """Divide each domain among separate clients, at random or (with `beta`) by `equal_dirichlet` within the domain.

    Args:
        pool: The samples, with groups.
        each: Number of clients per domain; by default `pool.clients` divided by the number of domains.
        beta: Dirichlet parameter of the class proportions within a domain; 0 divides at random.

    Returns:
        The client of each sample, int64 [N].

    Raises:
        UserError: The data have no groups, or a domain has fewer samples than clients.
    """
    domains = np.unique(_grouped(pool))
    owner = np.empty(len(pool.labels), np.int64)
    each = each or pool.clients // len(domains)
    for index, group in enumerate(domains):
        members = np.flatnonzero(pool.groups == group)
        if len(members) < each:
            raise UserError(
                f"partition 'domain:{each}': domain {group} has only {len(members)} samples; use fewer clients"
            )
        inner = replace(pool, labels=pool.labels[members], clients=each, groups=None)
        local = equal_dirichlet(inner, beta=beta) if beta else iid(inner)
        owner[members] = np.where(local < 0, -1, index * each + local)
    return owner


@_partition
def natural(pool: Pool) -> np.ndarray:
    """Make each group one client; the number of groups replaces the number of clients."""
    return np.unique(_grouped(pool), return_inverse=True)[1].astype(np.int64)


def _grouped(pool: Pool) -> np.ndarray:
    if pool.groups is None:
        raise UserError("partitions 'domain' and 'natural' need data with groups: styles, or clients as folders")
    return pool.groups


def _class_by_class(pool: Pool, alpha: float, cap: float) -> np.ndarray:
    """Divide each class in turn by shares drawn from Dir(alpha), among clients that hold fewer samples than the cap."""
    classes, sizes = np.unique(pool.labels, return_counts=True)

    def draw() -> np.ndarray:
        counts = np.zeros((len(classes), pool.clients), np.int64)
        for number, share in enumerate(pool.rng.dirichlet(np.full(pool.clients, alpha), len(classes))):
            open_ = counts.sum(0) < cap
            share = share * open_
            # If all shares have underflowed to 0, divide evenly among the clients below the cap.
            counts[number] = _cut(share if share.sum() > 0 else open_.astype(float), sizes[number], pool.rng)
        return counts

    counts = _draw_large_enough(pool, draw)
    owner = np.empty(len(pool.labels), np.int64)
    for label, count in zip(classes, counts, strict=True):
        members = pool.rng.permutation(np.flatnonzero(pool.labels == label))
        owner[members] = np.repeat(np.arange(pool.clients), count)
    return _top_up(pool, owner)


def _cut(share: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers that add up to the size and whose expected values are size × share."""
    # Without the random offset the first client would lose half a sample of each class and the last would gain it.
    ends = np.floor(np.cumsum(share) / share.sum() * size + rng.random()).astype(np.int64)
    ends[-1] = size
    return np.diff(np.minimum(ends, size), prepend=0)


def _draw_large_enough(pool: Pool, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Draw counts [·, clients] until every client has the minimum number of samples, at most REDRAWS times."""
    minimum = _attainable(pool)
    for _ in range(REDRAWS):
        counts = draw()
        short = int((counts.sum(0) < minimum).sum())
        # With over 30 clients below the minimum, a draw without any has a probability of about e^-30: stop early.
        if short == 0 or short > 30:
            break
    return counts


def _attainable(pool: Pool) -> int:
    # At most half the mean size, so that sizes stay uneven where there are too few samples for the minimum.
    return min(pool.minimum, max(1, len(pool.labels) // (2 * pool.clients)))


def _top_up(pool: Pool, owner: np.ndarray) -> np.ndarray:
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
