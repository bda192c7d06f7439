"""Data whose samples have several labels: how they are given, divided and counted."""

import numpy as np
import pytest
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data import combine, federate, from_arrays, from_clients, from_torch
from fedloom.data.federation import counts
from fedloom.data.partitions import PARTITIONS
from fedloom.data.sources.npz import read_npz, write_npz
from fedloom.report.federation_plot import plot_federation

X = np.random.default_rng(0).random((60, 3))
Y = (np.random.default_rng(1).random((60, 4)) < 0.4).astype(int)


class Frame:
    """As much of a pandas frame as is used; pandas is not a dependency."""

    columns = tuple("abcd")

    def __array__(self, dtype=None, copy=None):
        return Y


@pytest.mark.parametrize(
    "dataset",
    [
        from_arrays(X, Y, classes="abcd"),
        from_arrays(X, torch.from_numpy(Y).float(), classes=list("abcd")),
        from_arrays(X, Frame()),
        from_arrays(X, Y.astype(bool).tolist(), classes=tuple("abcd")),
    ],
    ids=["array", "tensor", "frame", "lists"],
)
def test_labels_are_columns_of_zero_and_one(dataset):
    assert dataset.multilabel and dataset.classes == tuple("abcd")
    assert dataset.labels.dtype == torch.uint8 and np.array_equal(dataset.labels, Y)


def test_pytorch_datasets_and_clients():
    pairs = torch.utils.data.TensorDataset(torch.rand(60, 3), torch.from_numpy(Y).float())
    assert np.array_equal(from_torch(pairs).labels, Y)
    dataset = from_clients({"north": (X[:20], Y[:20]), "south": (X[20:], Y[20:])})
    assert np.array_equal(dataset.labels, Y) and dataset.classes == ("0", "1", "2", "3")
    federation = federate(dataset, clients=9, partition="natural", seed=0)
    assert federation.names == ("north", "south")
    with pytest.raises(UserError, match=r"labels differ in shape: \(4,\) of client '0' and \(\) of client '1'"):
        from_clients([(X[:20], Y[:20]), (X[20:], Y[20:, 0])])


def test_one_hot_labels_get_a_hint():
    dataset = from_arrays(X, np.eye(4, dtype=int)[np.arange(60) % 4])
    with pytest.raises(UserError, match="several labels each; .* for one class per sample, give y.argmax.1. as labels"):
        federate(dataset, clients=3, partition="dirichlet:0.5", seed=0)


def test_one_column_is_one_class_per_sample():
    assert not from_arrays(X, Y[:, :1]).multilabel


@pytest.mark.parametrize(
    ("y", "why"),
    [(Y * 2, "must contain only 0 and 1"), (Y[:50], r"labels have shape \[50, 4\], for 60 samples"),
     (np.full((60, 2), "a"), "must contain only 0 and 1")],
)  # fmt: skip
def test_other_labels_are_refused(y, why):
    with pytest.raises(UserError, match=why):
        from_arrays(X, y)


def test_a_dataset_checks_its_labels():
    ready = {"name": "x", "inputs": torch.rand(2, 3), "test": torch.zeros(2, dtype=torch.bool), "classes": ("a", "b")}
    for labels, why in (
        (torch.zeros(2, 2), "must be torch.uint8"),
        (torch.zeros(2, 3, dtype=torch.uint8), "3 labels per sample for 2 names"),
        (torch.full((2, 2), 7, dtype=torch.uint8), "must be 0 or 1, but contain 7"),
    ):
        with pytest.raises(UserError, match=why):
            Dataset(labels=labels, **ready)


VALUES = {"dirichlet": ":1", "capped-dirichlet": ":1", "equal-dirichlet": ":1", "quantity": ":5", "pathological": ":2",
          "uneven-pathological": ":2", "grouped-pathological": ":2", "shards": ":2", "domain": ":2"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_partitions_by_class_are_refused_and_the_others_work(name):
    dataset = from_arrays(X, Y, groups=np.arange(60) % 3)
    spec = name + VALUES.get(name, "")
    if name not in ("iid", "quantity", "natural", "domain"):
        with pytest.raises(UserError, match=f"data.partition = '{spec}': it divides samples by their class"):
            federate(dataset, clients=6, partition=spec, seed=0)
        return
    federation = federate(dataset, clients=6, partition=spec, minimum=1, seed=0)
    assert sum(map(len, (*federation.train, *federation.test))) == 60
    table = counts(dataset, federation)
    assert table.tolist() == [Y[part].sum(0).tolist() for part in federation.train]


def test_domains_by_class_are_refused_and_an_official_test_set_is_dealt_by_size():
    dataset = from_arrays(X, Y, groups=np.arange(60) % 3, test=np.arange(60) >= 40)
    with pytest.raises(UserError, match="data.partition = 'domain:2:0.5': it divides samples by their class"):
        federate(dataset, clients=6, partition="domain:2:0.5", seed=0)
    federation = federate(dataset, clients=4, partition="iid", split="official", minimum=1, seed=0)
    assert sorted(np.concatenate(federation.test)) == list(range(40, 60))
    assert {len(part) for part in federation.test} == {5}


def test_an_npz_keeps_them_and_a_plot_counts_samples(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8)
    dataset = from_arrays(images, Y, classes="abcd", test=np.arange(60) % 3 == 0)
    write_npz(tmp_path / "set.npz", dataset)
    again = read_npz(tmp_path / "set.npz")
    assert again.multilabel and again.classes == tuple("abcd")
    order = np.argsort(np.arange(60) % 3 == 0, kind="stable")
    assert np.array_equal(again.labels, Y[order])
    plot_federation(again, federate(again, clients=4, partition="iid", seed=0), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    np.savez(tmp_path / "bad.npz", x=images, y=Y + 1)
    with pytest.raises(UserError, match=r"y of shape \[60, 4\] must contain only 0 and 1"):
        read_npz(tmp_path / "bad.npz")
    with pytest.raises(UserError, match="some have one class per sample, some several labels"):
        combine([dataset, from_arrays(images, np.arange(60) % 4)])
