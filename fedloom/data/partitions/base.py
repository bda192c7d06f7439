"""The interface of partitions: their input, their registry, and how `name:value` is parsed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import isfunction

import numpy as np

from fedloom.core.errors import UserError, nearest
from fedloom.core.options import declared, validated
from fedloom.core.registry import Registry, refuse_object


@dataclass(frozen=True)
class Pool:
    """Samples to divide among clients: the input of a partition."""

    labels: np.ndarray
    """Class of each sample, int64 [N]; uint8 [N, L] if a sample can have several labels."""
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
    asked: bool = True
    """Whether the user chose the number of clients."""
    spec: str = ""
    """The partition as written, for error messages."""

    @property
    def classes(self) -> np.ndarray:
        """The labels, for partitions that divide samples by class.

        Raises:
            UserError: Samples can have several labels.
        """
        if self.labels.ndim > 1:
            one_hot = bool((self.labels.sum(1) == 1).all())
            raise UserError(
                f"data.partition = '{self.spec}': it divides samples by their class, but these samples have several "
                "labels each; use iid, quantity:0.5, natural or domain"
                + ("; for one class per sample, give y.argmax(1) as labels" if one_hot else "")
            )
        return self.labels


Divide = Callable[..., np.ndarray]
PARTITIONS: Registry[Divide] = Registry(
    "data.partition", "a function of a fedloom.data.Pool that returns the client of each sample", isfunction,
    package="fedloom.data.partitions", group="fedloom.partitions",
)  # fmt: skip
CLIENTS: dict[Divide, Callable[..., int]] = {}
"""For partitions by group: the number of clients, as a function of the pool and the partition's values."""


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
        return self.divide in CLIENTS

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
        pool = replace(pool, spec=self.spec)
        clients = CLIENTS[self.divide](pool, *self.values) if self.by_group else pool.clients
        if clients > len(pool.labels):
            raise UserError(
                f"clients: {clients} clients cannot share {len(pool.labels)} samples; "
                f"use {len(pool.labels)} clients or fewer"
            )
        if clients != pool.clients and pool.asked:
            pool.notes.append(f"partition '{self.spec}' makes {clients} clients (not {pool.clients})")
        values = dict(zip(declared(self.divide), self.values, strict=False))
        owner = np.asarray(self.divide(replace(pool, clients=clients), **values))
        if owner.dtype.kind != "i" or owner.shape != (len(pool.labels),) or owner.max() >= clients:
            raise UserError(
                f"data.partition = '{self.spec}': the function returned {owner.dtype} {list(owner.shape)}; it must "
                f"return one integer for each of {len(pool.labels)} samples: a client below {clients}, or -1 for none"
            )
        if unused := int((owner < 0).sum()):
            pool.notes.append(f"partition '{self.spec}' leaves {unused} of {len(owner)} samples unused")
        order = np.argsort(owner, kind="stable")[unused:]
        ends = np.cumsum(np.bincount(owner[order], minlength=clients))
        return np.split(order, ends[:-1])


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
        refuse_object("data.partition", name)
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


def partition(*, clients: Callable[..., int] | None = None) -> Callable[[Divide], Divide]:
    """Register a shipped partition under its function name; its values are the keyword-only parameters.

    Args:
        clients: For partitions by group: returns the number of clients, given the pool and the values.
    """

    def register(divide: Divide) -> Divide:
        if clients is not None:
            CLIENTS[divide] = clients
        return PARTITIONS.add(divide.__name__.replace("_", "-"), divide)

    return register
