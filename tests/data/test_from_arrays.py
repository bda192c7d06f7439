"""Datasets from arrays, frames, PyTorch datasets and arrays per client."""

from typing import ClassVar

import numpy as np
import pandas
import pytest
import scipy.sparse
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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


def test_frames_give_numbers_and_inputs_of_0_or_1_without_missing_values():
    good = pandas.DataFrame({"age": X[:, 0], "smoker": Y > 0, "sex": pandas.Categorical(list("mfmfmfmf"))})
    dataset = from_arrays(good, Y)
    assert np.array_equal(dataset.inputs.numpy(), np.stack([X[:, 0], Y, Y, 1 - Y], axis=1))
    assert dataset.notes == ("columns of texts became inputs of 0 or 1: sex (f, m)",)
    holes = pandas.array([None, *[1] * 7], dtype="Int64")
    with pytest.raises(UserError, match=r"values are missing in age \(2\), dose \(1\); fill them"):
        from_arrays(good.assign(age=np.where(X[:, 0] < 6, np.nan, X[:, 0]), dose=holes), Y)
    with pytest.raises(UserError, match="columns day have dates"):
        from_arrays(good.assign(day=pandas.Timestamp("2020-01-31")), Y)
    with pytest.raises(UserError, match="two columns are called 'age'; rename one"):
        from_arrays(pandas.concat([good, good[["age"]]], axis=1), Y)


def test_arrays_may_be_views_of_any_memory_and_byte_order():
    wide = np.arange(96, dtype=">f8").reshape(16, 6)
    expected = from_arrays(wide.astype("<f4")[::-2, ::2].copy(), Y).inputs
    for x in (wide[::-2, ::2], np.asfortranarray(wide)[::-2, ::2], wide.astype(object)[::-2, ::2].astype("f2")):
        assert torch.equal(from_arrays(x, Y).inputs, expected)
    tensor = torch.from_numpy(wide.astype("f8")).flip(0)[::2, ::2].requires_grad_()
    assert torch.equal(from_arrays(tensor.bfloat16().double(), Y).inputs, expected)
    assert from_arrays(torch.zeros(1).expand(8, 3), Y).inputs.shape == (8, 3)


@pytest.mark.parametrize("kind", ["i4", "u1", "u8", "?", "f2", "S1", "U1", "O", "M8[D]"])
def test_labels_may_have_any_type(kind):
    labels = Y.astype("i8").astype(kind) if kind != "M8[D]" else Y.astype(kind)
    dataset = from_arrays(X, labels)
    assert dataset.labels.tolist() == Y.tolist() and len(dataset.classes) == 2
    if kind in ("S1", "U1", "i4"):
        assert dataset.classes == ("0", "1")


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, Y[:7], "7 labels for 8 samples"),
        (X, np.zeros(8), "all labels are '0'; at least two classes"),
        (X, Y / 2, "labels must be whole numbers or texts, but 4 of 8 are not, for example 0.5"),
        (X, np.where(Y, np.nan, 0), "4 of 8 labels are missing"),
        (X, np.array(["2020-01-01", "NaT"] * 4, "M8[D]"), "4 of 8 labels are missing"),
        (X, np.array([pandas.NA, "a"] * 4, object), "4 of 8 labels are missing"),
        (X, np.ma.masked_array(Y, Y > 0), "4 values of .* are masked"),
        (np.ma.masked_array(X, X > 20), Y, "3 values of x are masked; fill them, or drop the samples"),
        (X * 1e300, Y, r"x has values above 3.4e\+38; scale them"),
        (torch.from_numpy(X).to_sparse(), Y, r"x is a sparse tensor; give x.to_dense\(\)"),
        (scipy.sparse.csr_matrix(X), Y, r"x is a sparse matrix; give x.toarray\(\)"),
        (np.where(X == 7, np.nan, X), Y, "1 of 8 samples contain NaN or infinity, first sample 2"),
        (X[:0], Y[:0], "expected inputs"),
        (X[:, 0], Y, r"x has the shape \(8,\); expected inputs \[N, …\]; give one value per sample as x.reshape"),
        ([[1, 2], [3]], [0, 1], "x cannot be read as an array: setting an array element"),
        (np.array(list("abcdefgh")), Y, r"x has the type <U1; expected numbers .*, or a pandas frame"),
        ([X[0], X[1, :2]] * 4, Y, "x cannot be read as an array: .*; give all entries the same shape"),
        (X[:, :0], Y, r"x has the shape \(8, 0\); expected inputs"),
        (pandas.DataFrame(X)[:0], [], "dataset 'arrays': it has no samples"),
        (X, None, "labels are None; give one for each of 8 samples"),
        (X, X[:, 0] + 0.5, r"8 of 8 are not, for example 0.5; give classes, such as \(values > 0\).astype\(int\)"),
    ],
)
def test_what_does_not_fit_is_refused(x, y, words):
    with pytest.raises(UserError, match=words):
        from_arrays(x, y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test": [1, 2]}, r"test is int64 \[2\]; it must be a mask with one bool for each of 8 samples"),
        ({"test": [True, False]}, r"test is bool \[2\]; it must be a mask"),
        ({"test": np.arange(8)}, r"test is int64 \[8\]; it must be a mask"),
        ({"test": ["train"] * 8}, r"test is <U5 \[8\]; it must be a mask"),
        ({"test": [-1, 1] * 4}, r"test is int64 \[8\]; it must be a mask"),
        ({"test": np.full(8, np.nan)}, r"test is float64 \[8\]; it must be a mask"),
        ({"groups": [1, 2]}, "2 groups for 8 samples"),
        ({"classes": ["0", "1", "1"]}, r"classes = \('0', '1', '1'\): a name is there twice; remove one"),
        ({"classes": ["0"]}, "labels contain '1', which is not in classes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        from_arrays(X, Y, **options)


def test_classes_and_masks_may_be_whole_numbers():
    dataset = from_arrays(X, Y, classes=[1, 0], test=Y)
    assert dataset.classes == ("1", "0")
    assert dataset.labels.tolist() == (1 - Y).tolist() and dataset.test.tolist() == (Y == 1).tolist()


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (Y + 1, ("1", "2")),
        (Y.astype(float), ("0", "1")),
        (Y > 0, ("False", "True")),
        (Y * 2**62, ("0", str(2**62))),
        (Y.astype("u8") * np.uint64(2**64 - 1), ("0", str(2**64 - 1))),
        ([int(y) * 10**30 for y in Y], ("0", str(10**30))),
        (Y[:, None], ("0", "1")),
        (torch.from_numpy(Y), ("0", "1")),
        (pandas.Series(Y, index=range(8, 0, -1)), ("0", "1")),
        (pandas.Series(np.where(Y, "ill", "healthy"), dtype="string"), ("healthy", "ill")),
        (pandas.Categorical(np.where(Y, "b", "a"), categories=["c", "b", "a"]), ("a", "b")),
    ],
)
def test_labels_keep_their_order_and_names(labels, classes):
    dataset = from_arrays(X, labels)
    assert dataset.classes == classes and dataset.labels.tolist() == Y.tolist()


def test_arrays_that_are_read_only_or_need_gradients_are_copied():
    x, y = X.copy(), Y.copy()
    x.setflags(write=False)
    y.setflags(write=False)
    for inputs in (x, torch.tensor(X, requires_grad=True)):
        dataset = from_arrays(inputs, y)
        dataset.inputs.mul_(0)
        assert not dataset.inputs.requires_grad and x[-1, -1] == 23


def test_as_many_classes_as_samples_get_a_note():
    x = np.zeros((20, 2))
    assert from_arrays(x, np.arange(20)).notes == ("20 classes for 20 samples: check that the labels are classes",)
    assert from_arrays(x, np.arange(20) // 2).notes == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((X[:, :2], Y), r"samples differ in shape: \(3,\) of client 'a' and \(2,\) of client 'b'"),
        ((X.astype("u1"), Y), "inputs differ in type: numbers of client 'a' and uint8 of client 'b'"),
        ((X, np.array(list("nynynyny"))), "labels differ in type: numbers of client 'a' and texts of client 'b'"),
        ((X, Y[:5]), "client 'b' has 5 labels for 8 samples"),
        ((X[:0], Y[:0]), "client 'b' has no samples; leave it out"),
        ((np.float32(3), Y), "client 'b' has no samples; leave it out"),
        ((X, Y, Y), r"client 'b' must have a pair \(x, y\) of inputs and labels, .* not a tuple of 3"),
        ((np.where(X == 7, np.nan, X), Y), "1 of 8 samples of client 'b' contain NaN or infinity, first sample 2"),
        ((X, [0, None] * 4), "4 of 8 labels of client 'b' are missing; drop these samples"),
        (None, "client 'b' must have a pair"),
        ({"train": (X, Y), "dev": (X, Y)}, r"the splits train, dev cannot be used together; give one of them"),
    ],
)
def test_clients_that_do_not_fit_are_named(other, words):
    with pytest.raises(UserError, match=words):
        as_dataset({"a": (X, Y), "b": other})


def test_an_empty_frame_of_a_client_is_named():
    frame = pandas.DataFrame(X).assign(label=Y)
    with pytest.raises(UserError, match="client 'b' has no samples; leave it out"):
        as_dataset({"a": frame, "b": frame[:0]})


def test_names_of_clients_that_are_equal_as_texts_are_refused():
    with pytest.raises(UserError, match="two clients have the same name as texts"):
        as_dataset({0: (X, Y), "0": (X, Y)})


class Unsized:
    def __getitem__(self, i):
        return X[i], int(Y[i])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (Unsized(), "an object of type Unsized has no length; add a method __len__"),
        (Stream(), "an object of type Stream has no length; give a list of its samples, each a pair"),
        (zip(X, Y, strict=True), "an object of type zip has no length; give a list of its samples"),
        (TensorDataset, "an object of type type cannot be used; give a name, a pair"),
        ((X, Y, X, Y), 'an object of type tuple with 4 entries cannot be used; .*{"train": …, "test": …}'),
        (((X, Y), (X, Y)), 'a pair of tuples is not clear; give {"train": .x, y., "test": .x, y.}, or a list'),
        ([], "an object of type list with 0 entries cannot be used"),
    ],
)
def test_objects_that_hold_no_samples_are_refused_with_what_to_give(thing, words):
    with pytest.raises(UserError, match=f"^data: {words}"):
        as_dataset(thing)


def test_lists_of_samples_and_of_two_arrays_are_data():
    texts = [(x, "ab"[y]) for x, y in zip(X, Y, strict=True)]
    rows = tuple(map(tuple, X.tolist()))
    for thing in (
        [X, Y],
        [X.tolist(), Y.tolist()],
        (rows, tuple(Y.tolist())),
        list(Stream()),
        texts,
        [list(pair) for pair in texts],
    ):
        dataset = as_dataset(thing)
        assert dataset.groups is None and dataset.labels.tolist() == Y.tolist()
        assert np.array_equal(dataset.inputs.numpy(), X)


def test_a_single_split_is_divided_like_other_data():
    dataset = as_dataset({"train": (X, Y)})
    assert dataset.split is None and not dataset.test.any()


def test_other_objects_are_refused():
    with pytest.raises(UserError, match="data: an object of type set cannot be used; give a name"):
        as_dataset({1, 2})
    with pytest.raises(UserError, match="data: a DataLoader gives batches; give its dataset"):
        as_dataset(DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))))
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


def test_clients_may_have_datasets_frames_and_their_own_test_samples():
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    frame = pandas.DataFrame(X).assign(label=Y)
    for north in (pairs, Rows(), frame, [X, Y]):
        dataset = as_dataset({"north": north, "south": {"train": (X, Y), "test": (X[:3] + 1, Y[:3])}})
        assert dataset.group_names == ("north", "south")
        assert dataset.groups.tolist() == [0] * 8 + [1] * 11
        assert dataset.test.tolist() == [False] * 16 + [True] * 3
        assert np.array_equal(dataset.inputs.numpy(), np.concatenate([X, X, X[:3] + 1]))
        assert dataset.labels.tolist() == [*Y, *Y, *Y[:3]]
    names = as_dataset({str(site): Hugging() for site in range(12)}).group_names
    assert names == tuple(map(str, range(12)))  # in the order of the mapping
    wards = [frame.assign(ward=pandas.Categorical([ward] * 8)) for ward in "ab"]
    columns = as_dataset({"a": wards[0], "b": wards[1]}).inputs[:, -2:]
    assert columns.tolist() == [[1, 0]] * 8 + [[0, 1]] * 8  # the same inputs at all clients
    with pytest.raises(UserError, match="columns differ: "):
        as_dataset({"a": wards[0], "b": frame})


def test_train_and_test_are_never_two_clients():
    for part in ((X, Y), pandas.DataFrame(X).assign(label=Y)):
        dataset = as_dataset({"train": part, "test": part})
        assert dataset.groups is None and dataset.test.tolist() == [False] * 8 + [True] * 8


def test_a_sample_that_cannot_be_read_is_named():
    class Damaged(Rows):
        def __getitem__(self, i):
            return super().__getitem__(i) if i != 5 else {}[i]

    with pytest.raises(UserError, match="dataset 'Damaged': sample 5 cannot be read: KeyError: 5|sample 5 .*5"):
        from_torch(Damaged())
    with pytest.raises(UserError, match="dataset 'list': it has no samples"):
        from_torch([])
    with pytest.raises(UserError, match="sample 0 has 3 values; items must be"):
        from_torch([(1, 2, 3)])


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(X[0], 0), (X[1], 1, 2)], "sample 1 has 3 values; items must be"),
        ([(X[0], 0), {"x": X[1], "y": 1}], "sample 1 is a dict; items must be"),
        ([{"x": X[0], "y": 0}, (X[1], 1)], "sample 1 has 2 values; items must be"),
        ([{"x": X[0], "y": 0}, {"x": X[1], "z": 1}], "sample 1 has no column 'y', only x, z; add it"),
        ([(X[0], [0, 1]), (X[1], [0, 1, 1])], r"labels differ in shape: \(2,\) of sample 0 and \(3,\) of sample 1"),
        ([(X[0], 0), (X[1], [0, 1])], r"labels differ in shape: \(\) of sample 0 and \(2,\) of sample 1"),
        ([(X[0], 0), (X[1], [])], "sample 1 has an empty label"),
        ([(X[0], [0, 1]), (X[1], [0, [1]])], "the label of sample 1 cannot be read"),
    ],
)
def test_a_later_item_that_differs_is_named(items, words):
    with pytest.raises(UserError, match=f"dataset 'list': {words}"):
        from_torch(items)


@pytest.mark.parametrize("label", [None, float("nan"), 7])
def test_a_hugging_face_label_that_is_no_class_is_named(label):
    class Partly(Hugging):
        def __getitem__(self, i):
            return super().__getitem__(i) | ({"label": label} if i == 3 else {})

    with pytest.raises(UserError, match=f"1 of 8 samples have no label .sample 3: {label}.; leave them out"):
        from_torch(Partly())


def test_items_of_other_shapes_are_refused():
    pairs = [(X[i, : 3 - i // 7], int(Y[i])) for i in range(8)]
    with pytest.raises(UserError, match=r"samples differ in shape: \(3,\) of sample 0 and \(2,\) of sample 7"):
        from_torch(pairs)


def test_a_frame_with_labels_is_a_dataset():
    frame = pandas.DataFrame(X, columns=["age", "dose", "weight"]).assign(target=np.where(Y, "ill", "well"))
    for dataset in (as_dataset(frame), from_frame(frame, label="target")):
        assert dataset.classes == ("ill", "well")
        assert np.array_equal(dataset.inputs.numpy(), X)
    sites = from_frame(frame.assign(site=["x", "y"] * 4), client="site")
    assert sites.group_names == ("x", "y") and sites.groups.tolist() == [0, 1] * 4
    assert np.array_equal(sites.inputs.numpy(), X)
    with pytest.raises(UserError, match=r"no column is called .*; name the column .*from_frame.frame, label=NAME"):
        as_dataset(frame.drop(columns="target"))
    with pytest.raises(UserError, match="data.label = 'diagnosis': is not a column of dataset 'frame'"):
        from_frame(frame, label="diagnosis")
    levels = frame.set_axis(pandas.MultiIndex.from_product([["a"], frame.columns]), axis=1)
    assert np.array_equal(from_frame(levels, label="('a', 'target')").inputs.numpy(), X)
    with pytest.raises(UserError, match="client = 'target': is not another column"):
        from_frame(frame, label="target", client="target")
    with pytest.raises(UserError, match=r"values are missing in target \(4\)"):
        as_dataset(frame.assign(target=["a", None] * 4))
