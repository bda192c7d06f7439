"""Datasets from arrays, frames, PyTorch datasets and arrays per client."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedloom.core.errors import UserError
from fedloom.data import Dataset, from_arrays, from_clients, from_frame, from_splits, from_torch
from fedloom.data.from_objects import as_dataset

X = np.arange(24, dtype=np.float64).reshape(8, 3)
Y = np.array([0, 1] * 4)


def test_numbers_become_float32_and_keep_their_shape():
    for x in (X, X.astype(np.int16), X.astype(np.uint16), torch.from_numpy(X), X.tolist()):
        dataset = from_arrays(x, Y)
        assert dataset.inputs.dtype == torch.float32
        assert np.array_equal(dataset.inputs.numpy(), X)
    assert tuple(from_arrays(np.zeros((8, 2, 5)), Y).inputs.shape) == (8, 2, 5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 4, 5), (8, 1, 4, 5)),
        ((8, 4, 5, 3), (8, 3, 4, 5)),
        ((8, 3, 4, 5), (8, 3, 4, 5)),
        ((8, 1, 4, 3), (8, 1, 4, 3)),
    ],
)
def test_bytes_are_images_with_channels_first(shape, expected):
    x = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
    dataset = from_arrays(x, Y)
    assert dataset.inputs.dtype == torch.uint8
    assert tuple(dataset.inputs.shape) == expected
    if shape == (8, 4, 5, 3):
        assert np.array_equal(dataset.inputs.numpy(), x.transpose(0, 3, 1, 2))


def test_labels_are_coded_by_their_distinct_values():
    dataset = from_arrays(X, [2000, 0, 1000, 0, 0, 0, 0, 2000])
    assert dataset.classes == ("0", "1000", "2000")
    assert dataset.labels.tolist() == [2, 0, 1, 0, 0, 0, 0, 2]
    dataset = from_arrays(X, list("babababa"), classes=["c", "b", "a"])
    assert dataset.classes == ("c", "b", "a")
    assert dataset.labels.tolist() == [1, 2] * 4


def test_arrays_of_clients_are_one_dataset_with_groups():
    dataset = from_clients({"north": (X[:3], Y[:3]), "south": (X[3:], Y[3:])})
    assert dataset.group_names == ("north", "south")
    assert dataset.groups.tolist() == [0] * 3 + [1] * 5
    assert np.array_equal(dataset.inputs.numpy(), X)
    assert from_clients([(X[:3], Y[:3]), (X[3:], Y[3:])]).group_names == ("0", "1")


class Rows:
    """A dataset with named columns, as Hugging Face's are."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"id": i, "x": X[i], "label": int(Y[i])}


def test_datasets_of_other_libraries():
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for dataset in (from_torch(pairs), as_dataset(pairs), as_dataset(Rows())):
        assert np.array_equal(dataset.inputs.numpy(), X)
        assert dataset.labels.tolist() == Y.tolist()


class Frame:
    """As much of a pandas frame as is used; pandas is not a dependency."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return Series(self._columns[name])

    def to_numpy(self):
        return np.stack(list(self._columns.values()), axis=1)


class Series:
    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def isna(self):
        return np.isnan(self.values)


def test_frames_have_numeric_columns_without_missing_values():
    good = {"age": X[:, 0], "dose": X[:, 1]}
    assert np.array_equal(from_arrays(Frame(good), Y).inputs.numpy(), X[:, :2])
    with pytest.raises(UserError, match="columns sex are not numeric; encode them"):
        from_arrays(Frame(good | {"sex": np.array(list("mfmfmfmf"), object)}), Y)
    holes = X[:, 1].copy()
    holes[:2] = np.nan
    with pytest.raises(UserError, match=r"values are missing in dose \(2\)"):
        from_arrays(Frame(good | {"dose": holes}), Y)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, Y[:7], "7 labels for 8 samples"),
        (X, np.zeros(8), "all labels are '0'; at least two classes"),
        (X, Y / 2, "labels must be whole numbers or texts"),
        (np.where(X == 7, np.nan, X), Y, "1 of 8 samples contain NaN or infinity, first sample 2"),
        (X[:0], Y[:0], "expected inputs"),
        (X[:, 0], Y, r"float32 \[N, …\], but have dtype torch.float32 and shape \(8,\)"),
        ([[1, 2], [3]], [0, 1], "cannot be read as an array of numbers"),
        (np.array(list("abcdefgh")), Y, "cannot be read as an array of numbers"),
    ],
)
def test_what_does_not_fit_is_refused(x, y, words):
    with pytest.raises(UserError, match=words):
        from_arrays(x, y)


def test_clients_of_other_shapes_and_other_objects_are_refused():
    with pytest.raises(UserError, match=r"samples differ in shape: \(3,\) of client '0' and \(2,\) of client '1'"):
        from_clients([(X, Y), (X[:, :2], Y)])
    with pytest.raises(UserError, match="data: a set cannot be used; give a name"):
        as_dataset({1, 2})
    assert isinstance(as_dataset(from_arrays(X, Y)), Dataset)


class ClassLabel:
    names = ("cat", "dog", "emu")


class Hugging(Rows):
    """A Hugging Face dataset with class names; its last sample may have no label."""

    features: ClassVar = {"x": None, "label": ClassLabel()}

    def __init__(self, samples=range(8), unlabelled=False):
        self.samples, self.unlabelled = list(samples), unlabelled

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        label = -1 if self.unlabelled and i == len(self) - 1 else int(Y[self.samples[i]])
        return {"x": X[self.samples[i]].tolist(), "label": label}


def test_hugging_face_datasets_keep_their_class_names_and_splits():
    assert as_dataset(Hugging()).classes == ("cat", "dog", "emu")
    dataset = as_dataset({"train": Hugging(range(5)), "test": Hugging(range(5, 8))})
    assert dataset.classes == ("cat", "dog", "emu")
    assert dataset.test.tolist() == [False] * 5 + [True] * 3
    assert np.array_equal(dataset.inputs.numpy(), X) and dataset.labels.tolist() == Y.tolist()
    with pytest.raises(UserError, match="1 of 8 samples have no label"):
        as_dataset(Hugging(unlabelled=True))
    with pytest.raises(UserError, match="the splits train, validation cannot be used together; give one of them"):
        from_splits({"train": Hugging(), "validation": Hugging()})


def test_items_of_other_shapes_are_refused():
    pairs = [(X[i, : 3 - i // 7], int(Y[i])) for i in range(8)]
    with pytest.raises(UserError, match=r"samples differ in shape: \(3,\) of sample 0 and \(2,\) of sample 7"):
        from_torch(pairs)


def test_a_pandas_frame_with_labels_is_a_dataset():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["age", "dose", "weight"]).assign(target=np.where(Y, "ill", "well"))
    for dataset in (as_dataset(frame), from_frame(frame, label="target")):
        assert dataset.classes == ("ill", "well")
        assert np.array_equal(dataset.inputs.numpy(), X)
    with pytest.raises(UserError, match="the column of labels is not clear among age, dose, weight; use"):
        as_dataset(frame.drop(columns="target"))
    with pytest.raises(UserError, match="the column of labels is not clear"):
        from_frame(frame, label="diagnosis")
    with pytest.raises(UserError, match="labels are missing"):
        as_dataset(frame.assign(target=["a", None] * 4))
