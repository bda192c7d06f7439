"""A federation: which samples each client trains on and is tested on, and who is held out as a newcomer."""

import numpy as np

from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.rng import numpy_generator
from fedloom.core.task import Dataset, Federation
from fedloom.data.partition import Partition, Pool, parse_partition


def federate(
    dataset: Dataset,
    *,
    clients: int,
    partition: str | Partition,
    split: str = "pooled:0.75",
    minimum: int = 10,
    newcomers: float | int = 0,
    resample: bool = False,
    seed: int,
) -> Federation:
    """Divides a dataset among clients; the same call gives the same federation.

    partition: see `fedloom.data.partition`; a file that a text names is imported. split: where test data come from,
      `pooled:0.75`  training and test set pooled and divided; each client keeps 75% to train on
      `official`     the training set is divided; of the official test set each gets its share, class by class
      `common`       all are tested on the whole official test set (by domain: on that of their own domain)
      `domain:0.7`   of each domain 70% are divided among its clients; all of them are tested on the other 30%
    minimum: samples that divisions with random sizes leave each client. newcomers: how many clients, or which
    fraction of them, take no part in training. resample: every group's training data are brought to the mean
    size of a group, by leaving out or repeating samples of each client (FedStyle).
    """
    kind, kept = parse_split(split)
    _refuse_without_test_set(kind, split, dataset)
    if isinstance(partition, str):
        trusted_code.allow(partition)
        partition = parse_partition(partition)
    division, partition = partition, partition.spec
    if kind == "domain" and not division.by_group:
        raise UserError(f"split '{split}': needs clients of one domain each: data.partition = domain or natural")
    labels = dataset.labels.numpy()
    groups = None if dataset.groups is None else dataset.groups.numpy()
    if resample and groups is None:
        raise UserError(f"resample: dataset '{dataset.name}' has no groups whose sizes could be evened out")
    is_test = _held_out(groups, kept, seed, split) if kind == "domain" else dataset.test.numpy()
    pool = np.arange(len(labels)) if kind == "pooled" else np.flatnonzero(~is_test)
    notes: list[str] = []
    parts = division(
        Pool(
            labels=labels[pool],
            clients=clients,
            rng=numpy_generator(seed, "partition", partition),
            groups=None if groups is None else groups[pool],
            minimum=minimum,
            notes=notes,
        )
    )
    held = [pool[part] for part in parts]
    if without := [client for client, part in enumerate(held) if len(part) == 0]:
        raise UserError(
            f"data.partition = '{partition}': {len(without)} of {len(held)} clients get no samples, among them client "
            f"{without[0]}; use fewer clients, or another partition"
        )
    if small := sum(len(part) < minimum for part in held):
        notes.append(f"{small} of {len(held)} clients hold fewer than {minimum} samples")
    strata = labels if groups is None or not division.by_group else groups * len(dataset.classes) + labels
    rng = numpy_generator(seed, "split", split)
    if kind == "pooled":
        train, test = _split_each(held, kept, rng)
    elif kind == "official":
        train, test = held, _deal(held, np.flatnonzero(is_test), strata, rng, notes)
    else:
        train, test = held, _share(held, np.flatnonzero(is_test), groups, division)
    if empty := sum(len(part) == 0 for part in test):
        notes.append(f"{empty} of {len(test)} clients have no test samples")
    if resample and groups is not None:
        train = _even_out(train, groups, numpy_generator(seed, "resample"))
        sizes = np.bincount(groups[np.concatenate(train)], minlength=len(dataset.group_names))
        notes.append(f"each group's training data were resampled to {int(sizes.max())} samples")
    return Federation(train, test, _choose_newcomers(newcomers, len(train), seed), tuple(notes))


def counts(dataset: Dataset, federation: Federation) -> np.ndarray:
    """int64 [clients, classes]: how many training samples of each class a client has."""
    classes = len(dataset.classes)
    owner = np.repeat(np.arange(len(federation)), [len(part) for part in federation.train])
    labels = dataset.labels.numpy()[np.concatenate(federation.train)]
    return np.bincount(owner * classes + labels, minlength=len(federation) * classes).reshape(-1, classes)


def parse_split(split: str) -> tuple[str, float]:
    """`pooled:0.75` → the kind and the part to train on."""
    kind, colon, text = split.partition(":")
    if kind not in ("pooled", "official", "common", "domain"):
        raise UserError(
            f"unknown split '{split}': {nearest(kind, ['pooled:0.75', 'official', 'common', 'domain:0.7'])}"
        )
    if kind in ("pooled", "domain"):
        try:
            kept = float(text) if colon else 0.75
        except ValueError:
            kept = 0.0
        if not 0 < kept < 1:
            raise UserError(f"split '{split}': the part to train on must be between 0 and 1, for example {kind}:0.75")
        return kind, kept
    if colon:
        raise UserError(f"split '{split}': '{kind}' takes no value")
    return kind, 1.0


def _refuse_without_test_set(kind: str, split: str, dataset: Dataset) -> None:
    if kind == "domain" and dataset.groups is None:
        raise UserError(f"split '{split}': dataset '{dataset.name}' has no domains; use pooled:0.75")
    if kind in ("pooled", "domain"):
        return
    if not bool(dataset.test.any()):
        raise UserError(f"split '{split}': dataset '{dataset.name}' has no official test set; use pooled:0.75")
    if bool(dataset.test.all()):
        raise UserError(f"split '{split}': dataset '{dataset.name}' has no training set; use pooled:0.75")


def _held_out(groups: np.ndarray | None, kept: float, seed: int, split: str) -> np.ndarray:
    """Which samples are for tests: of each domain, the part that is not kept for training."""
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
    """Deals test samples as training samples are, stratum by stratum (class, or domain and class)."""
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
        notes.append(f"{unused} test samples are unused: nobody trains on their class")
    order = np.argsort(receiver, kind="stable")[unused:]
    ends = np.cumsum(np.bincount(receiver[order], minlength=len(held)))
    return np.split(pool[order], ends[:-1])


def _largest_remainder(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers in proportion to the weights that add up to the total; ties fall at random."""
    exact = weights * total
    shares, remainders = np.divmod(exact, weights.sum())
    order = np.lexsort((rng.random(len(weights)), -remainders))
    shares[order[: total - shares.sum()]] += 1
    return shares


def _share(
    held: list[np.ndarray], pool: np.ndarray, groups: np.ndarray | None, division: Partition
) -> list[np.ndarray]:
    """The whole test set for everyone, or that of the client's own domain; never copied."""
    if groups is None or not division.by_group:
        return [pool] * len(held)
    own = {int(group): pool[groups[pool] == group] for group in np.unique(groups)}
    return [own[int(groups[part[0]])] for part in held]


def _even_out(train: list[np.ndarray], groups: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Brings each group's training data to the mean size of a group.

    Each client leaves out or repeats samples of its own, in proportion: so that no sample moves from one
    client to another, nor into someone's test data.
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
