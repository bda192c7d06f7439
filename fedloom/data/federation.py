"""Division of a dataset into a federation: each client's training, validation and test samples, and the newcomers."""

from typing import NamedTuple

import numpy as np

from fedloom.core import trusted_code
from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError, nearest
from fedloom.core.federation import Federation
from fedloom.core.rng import numpy_generator
from fedloom.data.partitions import Partition, Pool, parse_partition
from fedloom.data.partitions.groups import natural

CLIENTS = 20
"""Default number of clients."""


def federate(
    dataset: Dataset,
    *,
    clients: int | None = None,
    partition: str | Partition,
    split: str = "pooled:0.75",
    minimum: int = 10,
    newcomers: float | int = 0,
    resample: bool = False,
    seed: int,
) -> Federation:
    """Divide a dataset among clients. The same arguments always give the same federation.

    Args:
        dataset: The dataset.
        clients: Number of clients; default: 20 (`natural` and `domain:k` derive it from the groups, and note it if
            another number was given).
        partition: How samples are divided: `dirichlet:0.1`; see `fedloom.data.partitions`. A Python file in it
            (`file.py:name`) is imported, which runs its code.
        split: Where test samples come from:
            `pooled:0.75`: training and test set are pooled and divided; each client trains on 75% of its samples;
            `official`: the training set is divided, and the official test set in each client's class proportions
            (with several labels per sample, in proportion to the clients' sizes);
            `common`: every client is tested on the whole official test set (for `domain` and `natural`, on the test
            samples of the client's domain);
            `domain:0.7`: 70% of each domain are divided among its clients, which are all tested on the other 30%.
            A further share sets validation samples aside: with `pooled:0.6:0.2` each client trains on 60% of its
            samples and is validated on 20%; `domain:0.6:0.2` likewise. With `official:0.8` and `common:0.8` each
            client trains on 80% of its training samples and is validated on the others. Test samples are the same
            as without validation (those of `pooled:0.8`, `domain:0.8`, `official` and `common`).
        minimum: Minimum number of samples per client, for partitions with random sizes.
        newcomers: Clients that take no part in training: their number, or a fraction below 1.
        resample: Bring each group's training data to the mean size of a group, by leaving out or repeating samples
            of each client (FedStyle).
        seed: Seed of all random choices.

    Returns:
        The federation: positions in the dataset of each client's samples. Its `notes` name anything unusual, and with
        `natural` its `names` are those of the groups.

    Raises:
        UserError: An argument is invalid, or the dataset cannot be divided this way.

    Example:
        >>> from fedloom.data import load
        >>> federation = federate(load("digits"), clients=10, partition="dirichlet:0.5", seed=0)
        >>> len(federation)
        10
    """
    kind, trained, validated = read_split(split)
    # Validation samples are taken from the training samples of a split without validation, so its test samples stay.
    outer = split if not validated else f"{kind}:{trained + validated:g}" if kind in _SHARED_OUT else kind
    kept = parse_split(outer)[1]
    _refuse_without_test_set(kind, split, dataset)
    if isinstance(partition, str):
        trusted_code.allow(partition)
        partition = parse_partition(partition)
    division, partition = partition, partition.spec
    if kind == "domain" and not division.by_group:
        raise UserError(
            f"data.split = '{split}': needs clients with one domain each; use data.partition = domain or natural"
        )
    labels = dataset.labels.numpy()
    groups = None if dataset.groups is None else dataset.groups.numpy()
    if resample and groups is None:
        raise UserError(f"resample: dataset '{dataset.name}' has no groups to resample; use resample = false")
    is_test = _held_out(groups, kept, seed, outer) if kind == "domain" else dataset.test.numpy()
    pool = np.arange(len(labels)) if kind == "pooled" else np.flatnonzero(~is_test)
    notes = list(dataset.notes)
    parts = division(
        Pool(
            labels=labels[pool],
            clients=CLIENTS if clients is None else clients,
            asked=clients is not None,
            rng=numpy_generator(seed, "partition", partition),
            groups=None if groups is None else groups[pool],
            minimum=minimum,
            notes=notes,
        )
    )
    held = [pool[part] for part in parts]
    if groups is not None and not dataset.styles and not division.by_group:
        notes.append(
            f"the data's {len(np.unique(groups))} clients were pooled, and their samples divided anew among "
            f"{len(held)} clients: data.partition = '{partition}'; --partition natural keeps the data's clients"
        )
    if without := [client for client, part in enumerate(held) if len(part) == 0]:
        raise UserError(
            f"data.partition = '{partition}': {len(without)} of {len(held)} clients get no samples, for example client "
            f"{without[0]}; use fewer clients, or another partition"
        )
    if small := sum(len(part) < minimum for part in held):
        notes.append(f"{small} of {len(held)} clients hold fewer than {minimum} samples")
    classes = np.zeros(len(labels), np.int64) if dataset.multilabel else labels
    strata = classes if groups is None or not division.by_group else groups * len(dataset.classes) + classes
    rng = numpy_generator(seed, "split", outer)
    if kind == "pooled":
        train, test = _split_each(held, kept, rng)
    elif kind == "official":
        train, test = held, _deal(held, np.flatnonzero(is_test), strata, rng, notes)
    else:
        train, test = held, _share(held, np.flatnonzero(is_test), groups, division)
    if empty := sum(len(part) == 0 for part in test):
        notes.append(f"{empty} of {len(test)} clients have no test samples")
    validation: list[np.ndarray] = []
    if validated:
        share = trained / (trained + validated)
        train, validation = _split_each(train, share, numpy_generator(seed, "validation", split))
        if empty := sum(len(part) == 0 for part in validation):
            notes.append(f"{empty} of {len(test)} clients have no validation samples")
    if resample and groups is not None:
        train = _even_out(train, groups, numpy_generator(seed, "resample"))
        sizes = np.bincount(groups[np.concatenate(train)], minlength=len(dataset.group_names))
        notes.append(f"each group's training data were resampled to {int(sizes.max())} samples")
    names: tuple[str, ...] = ()
    if division.divide is natural and groups is not None:
        names = tuple(dataset.group_names[group] for group in np.unique(groups[pool]))
    names = names if len(set(names)) == len(names) else ()  # a dataset may be combined with itself
    return Federation(train, test, _choose_newcomers(newcomers, len(train), seed), tuple(notes), names, validation)


def counts(dataset: Dataset, federation: Federation) -> np.ndarray:
    """Count each client's training samples by class, or by label if a sample can have several.

    Args:
        dataset: The dataset.
        federation: Its division.

    Returns:
        int64 [clients, classes].

    Example:
        >>> from fedloom.data import load
        >>> digits = load("digits")
        >>> counts(digits, federate(digits, clients=3, partition="iid", seed=0)).shape
        (3, 10)
    """
    if dataset.multilabel:
        every = dataset.labels.numpy()
        return np.stack([every[part].sum(0, dtype=np.int64) for part in federation.train])
    classes = len(dataset.classes)
    owner = np.repeat(np.arange(len(federation)), [len(part) for part in federation.train])
    labels = dataset.labels.numpy()[np.concatenate(federation.train)]
    return np.bincount(owner * classes + labels, minlength=len(federation) * classes).reshape(-1, classes)


class Split(NamedTuple):
    """A parsed `data.split`."""

    kind: str
    train: float
    """Share of samples to train on: of a client's samples (`pooled`), of a domain's, or of the training set."""
    validation: float
    """Share of the same samples to validate on; 0 without validation."""


_SHARED_OUT = ("pooled", "domain")
"""Splits whose shares are of all samples; those of the others are of the training set."""


def read_split(split: str) -> Split:
    """Parse a split such as `pooled:0.75` or, with validation samples, `pooled:0.6:0.2`.

    Args:
        split: `pooled[:share[:share]]`, `domain[:share[:share]]`, `official[:share]` or `common[:share]`.

    Returns:
        The kind, and the shares of samples to train and to validate on.

    Raises:
        UserError: The kind is unknown, or a share is not between 0 and 1.

    Example:
        >>> read_split("pooled:0.6:0.2")
        Split(kind='pooled', train=0.6, validation=0.2)
    """
    kind, *texts = split.split(":")
    if kind not in ("pooled", "official", "common", "domain"):
        raise UserError(
            f"unknown split '{split}': {nearest(kind, ['pooled:0.75', 'official', 'common', 'domain:0.7'])}"
        )
    try:
        shares = [float(text) for text in texts]
    except ValueError:
        shares = [0.0]
    if kind in _SHARED_OUT:
        shares = shares or [0.75]
        if len(shares) > 2 or not all(0 < share < 1 for share in shares):
            raise UserError(
                f"split '{split}': the share to train on must be between 0 and 1, for example {kind}:0.75; a second "
                f"share is for validation, for example {kind}:0.6:0.2"
            )
        if len(shares) == 2 and not sum(shares) < 1 - 1e-9:
            raise UserError(
                f"split '{split}': the shares for training and validation must add up to less than 1, because the "
                f"rest is test data; write for example {kind}:0.6:0.2"
            )
        return Split(kind, shares[0], shares[1] if len(shares) == 2 else 0.0)
    if not shares:
        return Split(kind, 1.0, 0.0)
    if len(shares) > 1 or not 0 < shares[0] < 1:
        raise UserError(
            f"split '{split}': '{kind}' takes no value, or the share of each client's training samples to train on "
            f"(the others are for validation); write {kind} or {kind}:0.8"
        )
    return Split(kind, shares[0], 1 - shares[0])


def parse_split(split: str) -> tuple[str, float]:
    """Parse a split such as `pooled:0.75`, without its share for validation (see `read_split`).

    Args:
        split: `pooled[:share]`, `official`, `common` or `domain[:share]`, each with an optional share for validation.

    Returns:
        The kind, and the share of samples to train on (0.75 by default; 1 for `official` and `common`).

    Raises:
        UserError: The kind is unknown, or a share is not between 0 and 1.

    Example:
        >>> parse_split("pooled:0.8")
        ('pooled', 0.8)
    """
    kind, train, _ = read_split(split)
    return kind, train


def _refuse_without_test_set(kind: str, split: str, dataset: Dataset) -> None:
    if kind == "domain" and dataset.groups is None:
        raise UserError(f"data.split = '{split}': dataset '{dataset.name}' has no domains; use pooled:0.75")
    if kind in ("pooled", "domain"):
        return
    if not bool(dataset.test.any()):
        raise UserError(f"data.split = '{split}': dataset '{dataset.name}' has no official test set; use pooled:0.75")
    if bool(dataset.test.all()):
        raise UserError(f"data.split = '{split}': dataset '{dataset.name}' has no training set; use pooled:0.75")


def _held_out(groups: np.ndarray | None, kept: float, seed: int, split: str) -> np.ndarray:
    """Return a mask of the test samples: a random share of each domain."""
    assert groups is not None
    rng = numpy_generator(seed, "split", split)
    held_out = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        held_out[members[max(1, round(kept * len(members))) :]] = True
    return held_out


def _split_each(
    held: list[np.ndarray], kept: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    train, test = [], []
    for part in held:
        shuffled = rng.permutation(part)
        count = min(max(1, round(kept * len(part))), max(1, len(part) - 1))
        train.append(np.sort(shuffled[:count]))
        test.append(np.sort(shuffled[count:]))
    return train, test


def _deal(
    held: list[np.ndarray], pool: np.ndarray, strata: np.ndarray, rng: np.random.Generator, notes: list[str]
) -> list[np.ndarray]:
    """Divide test samples in proportion to training samples, for each stratum (class, or domain and class)."""
    owner = np.repeat(np.arange(len(held)), [len(part) for part in held])
    pairs, amounts = np.unique(strata[np.concatenate(held)] * len(held) + owner, return_counts=True)
    stratum_of, owner_of = np.divmod(pairs, len(held))
    receiver = np.full(len(pool), -1)
    for stratum in np.unique(strata[pool]):
        here = slice(*np.searchsorted(stratum_of, [stratum, stratum + 1]))
        members = np.flatnonzero(strata[pool] == stratum)
        if here.start == here.stop:
            continue
        shares = _largest_remainder(amounts[here], len(members), rng)
        receiver[rng.permutation(members)] = np.repeat(owner_of[here], shares)
    if unused := int((receiver < 0).sum()):
        notes.append(f"{unused} test samples are unused: no client trains on their class")
    order = np.argsort(receiver, kind="stable")[unused:]
    ends = np.cumsum(np.bincount(receiver[order], minlength=len(held)))
    return np.split(pool[order], ends[:-1])


def _largest_remainder(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Return whole numbers in proportion to the weights that add up to the total; ties are broken at random."""
    exact = weights * total
    shares, remainders = np.divmod(exact, weights.sum())
    order = np.lexsort((rng.random(len(weights)), -remainders))
    shares[order[: total - shares.sum()]] += 1
    return shares


def _share(
    held: list[np.ndarray], pool: np.ndarray, groups: np.ndarray | None, division: Partition
) -> list[np.ndarray]:
    """Return each client's test set: the whole one or that of its domain, as one shared array."""
    if groups is None or not division.by_group:
        return [pool] * len(held)
    own = {int(group): pool[groups[pool] == group] for group in np.unique(groups)}
    return [own[int(groups[part[0]])] for part in held]


def _even_out(train: list[np.ndarray], groups: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Bring each group's training data to the mean size of a group.

    Each client leaves out or repeats some of its samples, in proportion, so that no sample moves to another client or
    into test data.
    """
    owner = np.repeat(np.arange(len(train)), [len(part) for part in train])
    positions = np.concatenate(train)
    present = np.unique(groups[positions])
    target = round(len(positions) / len(present))
    drawn: list[list[np.ndarray]] = [[] for _ in train]
    for group in present:
        mine = groups[positions] == group
        holders, sizes = np.unique(owner[mine], return_counts=True)
        ends = np.cumsum(sizes)
        for client, samples, size in zip(
            holders, np.split(positions[mine], ends[:-1]), _largest_remainder(sizes, target, rng), strict=True
        ):
            whole, rest = divmod(max(1, int(size)), len(samples))
            drawn[client] += [samples] * whole + [rng.permutation(samples)[:rest]]
    return [np.sort(np.concatenate(parts)) for parts in drawn]


def _choose_newcomers(newcomers: float | int, clients: int, seed: int) -> tuple[int, ...]:
    count = round(newcomers * clients) if 0 < newcomers < 1 else int(newcomers)
    if newcomers < 0 or (newcomers >= 1 and count != newcomers) or count >= clients:
        raise UserError(f"newcomers: {newcomers} must be a number of clients below {clients}, or a fraction below 1")
    chosen = numpy_generator(seed, "newcomers").choice(clients, count, replace=False)
    return tuple(sorted(int(client) for client in chosen))
