import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.data import Dataset, Federation, counts, federate


def make(per_class: int = 240, classes: int = 10, tested: float = 0.25, groups: list[int] | None = None) -> Dataset:
    count = per_class * classes
    rng = np.random.default_rng(3)
    styles = (
        None
        if groups is None
        else torch.from_numpy(rng.permutation(np.resize(np.repeat(range(len(groups)), groups), count)))
    )
    return Dataset(
        name="toy",
        inputs=torch.zeros(count, 1, 2, 2, dtype=torch.uint8),
        labels=torch.from_numpy(rng.permutation(np.arange(count) % classes)),
        test=torch.from_numpy(rng.random(count) < tested),
        classes=tuple(map(str, range(classes))),
        groups=styles,
        group_names=() if groups is None else tuple(f"style{i}" for i in range(len(groups))),
    )


def federation(dataset: Dataset, **fields: Any) -> Federation:
    given = {"clients": 20, "partition": "dirichlet:0.5", "seed": 0}
    return federate(dataset, **(given | fields))


def same(a: Federation, b: Federation) -> bool:
    pairs = zip(a.train + a.test, b.train + b.test, strict=True)
    return a.newcomers == b.newcomers and all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("split", ["pooled:0.75", "official", "common"])
def test_the_same_call_gives_the_same_federation_and_another_seed_another(split: str) -> None:
    dataset = make()
    assert same(federation(dataset, split=split, newcomers=3), federation(dataset, split=split, newcomers=3))
    assert not same(federation(dataset, split=split), federation(dataset, split=split, seed=1))


@pytest.mark.parametrize(("split", "kept"), [("pooled:0.75", 0.75), ("pooled:0.8", 0.8), ("pooled", 0.75)])
def test_pooled_uses_all_samples_once_and_splits_each_client(split: str, kept: float) -> None:
    fed = federation(make(), split=split)
    assert np.array_equal(np.sort(np.concatenate(fed.train + fed.test)), np.arange(2400))
    for train, test in zip(fed.train, fed.test, strict=True):
        assert abs(len(train) - kept * (len(train) + len(test))) <= 0.5
        assert np.all(np.diff(train) > 0)
        assert np.all(np.diff(test) > 0)


def test_tiny_clients_train_on_one_sample_and_are_tested_on_one_if_they_have_two() -> None:
    fed = federation(make(per_class=3, classes=5), clients=10, partition="iid", split="pooled:0.9", minimum=1)
    assert sorted((len(a), len(b)) for a, b in zip(fed.train, fed.test, strict=True)) == [(1, 0)] * 5 + [(1, 1)] * 5
    assert fed.notes == ("5 of 10 clients have no test samples",)


def test_official_divides_the_training_set_and_deals_the_test_set_in_the_same_proportions() -> None:
    dataset = make()
    fed = federation(dataset, split="official")
    official = np.flatnonzero(dataset.test.numpy())
    assert np.array_equal(np.sort(np.concatenate(fed.test)), official)
    assert np.array_equal(np.sort(np.concatenate(fed.train)), np.flatnonzero(~dataset.test.numpy()))
    labels = dataset.labels.numpy()
    trained = counts(dataset, fed)
    tested = np.stack([np.bincount(labels[part], minlength=10) for part in fed.test])
    quota = trained / trained.sum(0) * np.bincount(labels[official], minlength=10)
    assert np.abs(tested - quota).max() < 1


def test_official_by_domain_keeps_test_samples_in_their_domain() -> None:
    dataset = make(groups=[1, 2, 3])
    assert dataset.groups is not None
    groups = dataset.groups.numpy()
    fed = federation(dataset, partition="domain:4:0.5", split="official")
    assert len(fed) == 12
    for client in range(12):
        assert set(groups[fed.train[client]]) == {client // 4}
        assert set(groups[fed.test[client]]) <= {client // 4}
    assert sum(map(len, fed.test)) == int(dataset.test.sum())
    mixed = federation(dataset, partition="iid", split="official")
    assert {len(set(groups[part])) for part in mixed.test} == {3}


def test_test_samples_of_classes_that_nobody_trains_on_are_left_and_said() -> None:
    dataset = make()
    fed = federation(dataset, clients=3, partition="pathological:2", split="official")
    held = counts(dataset, fed).sum(0) > 0
    labels = dataset.labels.numpy()
    unused = int((dataset.test.numpy() & ~held[labels]).sum())
    assert held.sum() == 6
    assert sum(map(len, fed.test)) == int(dataset.test.sum()) - unused
    assert f"{unused} test samples are unused: no client trains on their class" in fed.notes


def test_common_shares_one_test_array() -> None:
    dataset = make()
    fed = federation(dataset, split="common")
    assert all(part is fed.test[0] for part in fed.test)
    assert np.array_equal(fed.test[0], np.flatnonzero(dataset.test.numpy()))


@pytest.mark.parametrize("partition", ["domain:4", "natural"])
def test_common_by_domain_is_the_test_set_of_the_own_style(partition: str) -> None:
    dataset = make(groups=[1, 2, 3])
    assert dataset.groups is not None
    fed = federation(dataset, partition=partition, split="common")
    each = len(fed) // 3
    for client, part in enumerate(fed.test):
        assert part is fed.test[client // each * each]
        own = (dataset.groups == client // each) & dataset.test
        assert np.array_equal(part, np.flatnonzero(own.numpy()))


@pytest.mark.parametrize("split", ["official", "common"])
def test_without_an_official_test_set_pooled_is_advised(split: str) -> None:
    with pytest.raises(UserError, match=r"'toy' has no official test set; use pooled:0\.75"):
        federation(make(tested=0), split=split)


@pytest.mark.parametrize("split", [
    "poold:0.8", "pooled:1", "pooled:0", "pooled:x", "official:2", "", "pooled:0.8:0.2", "pooled:0.5:0.2:0.1",
    "official:0.6:0.2", "common:x", "pooled:0.5:-0.1",
])  # fmt: skip
def test_a_split_that_cannot_be_read_is_refused(split: str) -> None:
    with pytest.raises(UserError, match="split"):
        federation(make(), split=split)


def test_newcomers_are_a_number_or_a_fraction_of_the_clients() -> None:
    dataset = make()
    fed = federation(dataset, newcomers=4)
    assert len(fed.newcomers) == len(set(fed.newcomers)) == 4
    assert list(fed.newcomers) == sorted(fed.newcomers)
    assert all(0 <= client < 20 and type(client) is int for client in fed.newcomers)
    assert federation(dataset, newcomers=0.2).newcomers == fed.newcomers
    assert federation(dataset).newcomers == ()
    assert len({federation(dataset, newcomers=4, seed=s).newcomers for s in range(5)}) > 1
    assert same(federation(dataset), Federation(fed.train, fed.test))
    for wrong in (20, -1, 2.5):
        with pytest.raises(UserError, match=f"newcomers: {wrong}"):
            federation(dataset, newcomers=wrong)


@pytest.mark.parametrize("split", ["pooled:0.75", "official"])
def test_resampling_brings_every_group_to_the_mean_from_the_clients_own_samples(split: str) -> None:
    dataset = make(groups=[1, 2, 5])
    assert dataset.groups is not None
    plain = federation(dataset, partition="domain:4", split=split)
    fed = federation(dataset, partition="domain:4", split=split, resample=True)
    groups = dataset.groups.numpy()
    per_group = np.bincount(groups[np.concatenate(fed.train)])
    assert len(set(per_group)) == 1
    assert per_group[0] == round(sum(map(len, plain.train)) / 3)
    for before, after, test in zip(plain.train, fed.train, fed.test, strict=True):
        assert set(after) <= set(before)
        assert not set(after) & set(test)
        times = np.bincount(after, minlength=2400)[before]
        # a sample is left out only where none is repeated, and repeats are even
        assert times.max() - times.min() <= 1
    assert fed.notes[-1] == f"each group's training data were resampled to {per_group[0]} samples"


def test_resampling_needs_groups() -> None:
    with pytest.raises(UserError, match="resample: dataset 'toy' has no groups"):
        federation(make(), resample=True)


def test_counts_are_training_labels_per_client() -> None:
    dataset = make()
    fed = federation(dataset)
    expected = np.zeros((20, 10), int)
    for client, part in enumerate(fed.train):
        for position in part:
            expected[client, int(dataset.labels[position])] += 1
    assert np.array_equal(counts(dataset, fed), expected)


def test_small_clients_are_said() -> None:
    fed = federation(make(), clients=300, partition="iid")
    assert "300 of 300 clients hold fewer than 10 samples" in fed.notes


@pytest.mark.parametrize("split", ["pooled:0.75", "official", "common"])
def test_ten_thousand_clients_are_federated_in_seconds(split: str) -> None:
    dataset = make(per_class=7000, tested=1 / 7)
    start = time.perf_counter()
    fed = federation(dataset, clients=10_000, partition="dirichlet:0.1", split=split, newcomers=0.1)
    assert time.perf_counter() - start < 5
    assert (len(fed.train), len(fed.newcomers)) == (10_000, 1000)
    assert min(map(len, fed.train)) >= 1


@pytest.mark.parametrize("split", ["pooled:0.6:0.2", "common"])
def test_a_federation_is_the_same_after_pickling(split: str) -> None:
    fed = federation(make(), clients=30, partition="dirichlet:0.1", split=split, newcomers=3)
    again = pickle.loads(pickle.dumps(fed))
    assert (len(again), again.newcomers, again.notes) == (30, fed.newcomers, fed.notes)
    assert all(map(np.array_equal, (*again.train, *again.test), (*fed.train, *fed.test)))
    assert len(set(map(id, again.test))) == len(set(map(id, fed.test)))  # a common test set is still one array
    assert all(map(np.array_equal, again.validation, fed.validation))
    assert again.validates == fed.validates == (split != "common")


@pytest.mark.parametrize(
    ("split", "without", "share"),
    [("pooled:0.6:0.2", "pooled:0.8", 0.75), ("official:0.8", "official", 0.8), ("common:0.9", "common", 0.9)],
)
def test_validation_samples_come_from_the_training_samples_and_test_samples_stay(
    split: str, without: str, share: float
) -> None:
    plain, fed = federation(make(), split=without), federation(make(), split=split)
    assert not plain.validates
    assert [len(part) for part in plain.validation] == [0] * 20
    for part in range(20):
        assert np.array_equal(fed.test[part], plain.test[part])
        both = np.concatenate([fed.train[part], fed.validation[part]])
        assert np.array_equal(np.sort(both), plain.train[part])
        assert abs(len(fed.train[part]) - share * len(both)) <= 0.5
        assert np.all(np.diff(fed.validation[part]) > 0)


def test_domains_have_validation_samples_too() -> None:
    dataset = make(groups=[1, 2])
    plain = federation(dataset, partition="domain:3", split="domain:0.8")
    fed = federation(dataset, partition="domain:3", split="domain:0.5:0.3", resample=True)
    taken = np.concatenate(fed.validation)
    assert np.array_equal(np.unique(np.concatenate(fed.test)), np.unique(np.concatenate(plain.test)))
    assert len(taken) == pytest.approx(0.3 * len(dataset), abs=6)
    assert not np.isin(taken, np.concatenate(fed.train)).any()  # resampling repeats training samples only
    assert not np.isin(taken, np.concatenate(fed.test)).any()


def test_clients_too_small_for_validation_are_counted() -> None:
    fed = federation(make(per_class=3, classes=5), clients=5, partition="iid", split="pooled:0.34:0.33", minimum=1)
    assert [tuple(map(len, parts)) for parts in zip(fed.train, fed.validation, fed.test, strict=True)] == [
        (1, 1, 1)
    ] * 5
    fed = federation(make(per_class=2, classes=5), clients=5, partition="iid", split="pooled:0.6:0.2", minimum=1)
    assert fed.notes[-1] == "5 of 5 clients have no validation samples"
    assert list(map(len, fed.train)) == [1] * 5
