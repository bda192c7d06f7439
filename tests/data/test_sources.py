"""Every format of a named dataset, from small files made here."""

import bz2
import gzip
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.data import Dataset, load

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def labels_of(dataset: Dataset, *, test: bool) -> list[int]:
    return dataset.labels[dataset.test == test].tolist()


def test_digits_are_scaled_from_16_to_255() -> None:
    from sklearn.datasets import load_digits

    dataset = load("digits")
    assert dataset.inputs.shape == (1797, 1, 8, 8)
    assert not bool(dataset.test.any())
    original = load_digits().images[5]
    assert torch.equal(dataset.inputs[5, 0], torch.tensor(original * 255 / 16).round().to(torch.uint8))
    assert int(dataset.inputs.max()) == 255


def test_digits_are_the_same_if_scikit_learn_stores_them_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = load("digits")
    monkeypatch.setattr("fedloom.data.sources.digits.find_spec", lambda name: None)
    from_library = load("digits")
    assert torch.equal(from_file.inputs, from_library.inputs)
    assert torch.equal(from_file.labels, from_library.labels)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_gzipped_or_not(
    tmp_path: Path, write_idx: Callable[..., None], name: str, ending: str
) -> None:
    train, test = pixels(5, 28, 28), pixels(2, 28, 28)
    write_idx(tmp_path / name / f"train-images-idx3-ubyte{ending}", train)
    write_idx(tmp_path / name / f"train-labels-idx1-ubyte{ending}", np.array([3, 1, 4, 1, 5]))
    write_idx(tmp_path / name / f"t10k-images-idx3-ubyte{ending}", test)
    write_idx(tmp_path / name / f"t10k-labels-idx1-ubyte{ending}", np.array([9, 2]))
    dataset = load(name, folder=tmp_path)
    assert np.array_equal(dataset.inputs.numpy()[:, 0], np.concatenate([train, test]))
    assert labels_of(dataset, test=False) == [3, 1, 4, 1, 5]
    assert labels_of(dataset, test=True) == [9, 2]
    assert load(name, folder=tmp_path, size=14).inputs.shape == (7, 1, 14, 14)


@pytest.mark.parametrize(
    ("name", "part", "first", "classes"), [("emnist", "balanced", 0, 47), ("emnist-letters", "letters", 1, 26)]
)
def test_emnist_images_are_turned_upright_and_letters_count_from_zero(
    tmp_path: Path, write_idx: Callable[..., None], name: str, part: str, first: int, classes: int
) -> None:
    train = pixels(3, 28, 28)
    for split in ("train", "test"):
        write_idx(tmp_path / f"emnist/emnist-{part}-{split}-images-idx3-ubyte.gz", train)
        last = classes - 1 + first
        write_idx(tmp_path / f"emnist/emnist-{part}-{split}-labels-idx1-ubyte.gz", np.array([first, last, first]))
    dataset = load(name, folder=tmp_path)
    assert np.array_equal(dataset.inputs[1, 0].numpy(), train[1].T)
    assert labels_of(dataset, test=False) == [0, classes - 1, 0]
    assert len(dataset.classes) == classes
    assert dataset.classes[:2] == (("0", "1") if first == 0 else ("a", "b"))


def test_damaged_idx_files_are_named(tmp_path: Path, write_idx: Callable[..., None]) -> None:
    folder = tmp_path / "mnist"
    for part, count in (("train", 4), ("t10k", 2)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels(count, 28, 28))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.zeros(count))
    broken = folder / "train-images-idx3-ubyte.gz"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz: cannot be read"):
        load("mnist", folder=tmp_path)
    broken.write_bytes(gzip.compress(gzip.decompress(whole)[:-9]))
    with pytest.raises(UserError, match="its header promises 3152 bytes, but it has 3143"):
        load("mnist", folder=tmp_path)
    broken.write_bytes(gzip.compress(b"<html>not found</html>"))
    with pytest.raises(UserError, match="is not an IDX file of bytes"):
        load("mnist", folder=tmp_path)
    write_idx(broken, pixels(3, 28, 28))
    with pytest.raises(UserError, match=r"images \[3, 28, 28\] and labels \[4\] do not match"):
        load("mnist", folder=tmp_path)


def write_cifar10(root: Path, protocol: int = 2, key: Callable[[str], Any] = str, **meta: Any) -> np.ndarray:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    data = pixels(12, 3072)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for i, name in enumerate(names):
        batch = {key("data"): data[2 * i : 2 * i + 2], key("labels"): [i, 9], key("batch_label"): key("x")}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    classes = [key(f"class{i}") for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({key("label_names"): classes} | meta, protocol=protocol))
    return data


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_cifar10_batches_are_read_whatever_pickled_them(
    tmp_path: Path, protocol: int, key: Callable[[str], Any]
) -> None:
    data = write_cifar10(tmp_path, protocol, key)
    dataset = load("cifar10", folder=tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), data.reshape(12, 3, 32, 32))
    assert labels_of(dataset, test=False) == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert labels_of(dataset, test=True) == [5, 9]
    assert dataset.classes[3] == "class3"


def test_a_batch_that_python_2_pickled_is_read(tmp_path: Path) -> None:
    # What Python 2 wrote: 8-bit strings (opcode U) for the keys and for the raw bytes of the array.
    raw = bytes(range(256)) * 12
    write_cifar10(tmp_path)
    image = b"T" + len(raw).to_bytes(4, "little") + raw
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + image + b"tb"
    )
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(batch)
    dataset = load("cifar10", folder=tmp_path)
    assert dataset.inputs[-1].flatten().tolist() == list(raw)
    assert labels_of(dataset, test=True) == [7]


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    data = pixels(5, 3072)
    for name, part in (("train", slice(0, 3)), ("test", slice(3, 5))):
        count = len(data[part])
        batch = {b"data": data[part], b"fine_labels": [99] * count, b"coarse_labels": [1] * count}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"fine{i}" for i in range(100)]}))
    dataset = load("cifar100", folder=tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), data.reshape(5, 3, 32, 32))
    assert dataset.labels.tolist() == [99] * 5
    assert (len(dataset.classes), dataset.classes[99]) == (100, "fine99")


class Touch:
    """Unpickled without care, it would make a file."""

    def __init__(self, path: Path, how: Any = None):
        self.path, self.how = path, how or Path.touch

    def __reduce__(self) -> Any:
        return self.how, (self.path,)


@pytest.mark.parametrize("place", ["batches.meta", "data_batch_1", "test_batch"])
def test_a_malicious_pickle_is_refused_and_nothing_runs(tmp_path: Path, place: str) -> None:
    write_cifar10(tmp_path)
    bait = tmp_path / "ran"
    path = tmp_path / "cifar-10-batches-py" / place
    path.write_bytes(pickle.dumps({"data": Touch(bait), "labels": [0], "label_names": []}))
    with pytest.raises(UserError, match=f"{place}.* calls .* which is not allowed"):
        load("cifar10", folder=tmp_path)
    assert not bait.exists()


@pytest.mark.parametrize(
    "attack",
    [
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
    ],
)
def test_only_what_rebuilds_an_array_is_allowed(tmp_path: Path, attack: bytes) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_2").write_bytes(attack)
    with pytest.raises(UserError, match=r"data_batch_2: .* is not allowed"):
        load("cifar10", folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot|Ran out|can be read"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}), "has no 'labels'"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 0]}), "data must be uint8"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}), "1 labels .* for 2 images"),
        (pickle.dumps([1]), "must be a dict, not a list"),
    ],
)
def test_damaged_cifar_batches_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_4").write_bytes(content)
    with pytest.raises(UserError, match=f"data_batch_4: .*({words})"):
        load("cifar10", folder=tmp_path)


def test_a_label_out_of_range_names_the_dataset_and_the_label(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    batch = {"data": pixels(1, 3072), "labels": [10]}
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(UserError, match="dataset 'cifar10': label 10 of sample 10 is out of range"):
        load("cifar10", folder=tmp_path)


def test_svhn_is_read_from_matlab_files_with_ten_as_zero(tmp_path: Path) -> None:
    from scipy.io import savemat

    (tmp_path / "svhn").mkdir()
    x = pixels(32, 32, 3, 5)
    savemat(tmp_path / "svhn/train_32x32.mat", {"X": x[..., :3], "y": np.array([[10], [1], [9]], np.uint8)})
    savemat(tmp_path / "svhn/test_32x32.mat", {"X": x[..., 3:], "y": np.array([[2], [10]], np.uint8)})
    dataset = load("svhn", folder=tmp_path)
    assert np.array_equal(dataset.inputs[4].numpy(), x[..., 4].transpose(2, 0, 1))
    assert labels_of(dataset, test=False) == [0, 1, 9]
    assert labels_of(dataset, test=True) == [2, 0]
    (tmp_path / "svhn/test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(UserError, match=r"test_32x32\.mat: "):
        load("svhn", folder=tmp_path)


@pytest.mark.parametrize("name", ["svhn", "mnist-m"])
def test_svhn_and_mnist_m_are_read_from_a_pair_of_npz(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"{name}-subset"
    folder.mkdir()
    x = pixels(5, 32, 32, 3)
    np.savez(folder / "train.npz", x=x[:3], y=np.array([0, 1, 9]))
    np.savez(folder / "test.npz", x=x[3:], y=np.array([2, 0], np.uint8))
    dataset = load(name, folder=tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), x.transpose(0, 3, 1, 2))
    assert labels_of(dataset, test=False) == [0, 1, 9]
    assert labels_of(dataset, test=True) == [2, 0]
    assert len(dataset.classes) == 10


def write_usps_h5(root: Path) -> np.ndarray:
    h5py = pytest.importorskip("h5py")
    (root / "usps").mkdir()
    values = np.linspace(0, 1, 5 * 256, dtype=np.float32).reshape(5, 256)
    with h5py.File(root / "usps/usps.h5", "w") as file:
        for name, part in (("train", slice(0, 3)), ("test", slice(3, 5))):
            file[f"{name}/data"], file[f"{name}/target"] = values[part], np.arange(5)[part]
    return values


def test_usps_is_read_from_hdf5(tmp_path: Path) -> None:
    values = write_usps_h5(tmp_path)
    dataset = load("usps", folder=tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), np.rint(values * 255).astype(np.uint8).reshape(5, 1, 16, 16))
    assert labels_of(dataset, test=False) == [0, 1, 2]
    assert labels_of(dataset, test=True) == [3, 4]


def test_hdf5_without_h5py_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_usps_h5(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"usps\.h5: .*pip install 'fedloom\[hdf5\]'"):
        load("usps", folder=tmp_path)


def test_usps_is_read_from_libsvm_files_and_pixels_left_out_are_mid_grey(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    (tmp_path / "usps/usps.bz2").write_bytes(bz2.compress(b"7 1:-1 2:1 256:0.5\n10 1:0.25\n"))
    (tmp_path / "usps/usps.t.bz2").write_bytes(bz2.compress(b"1 16:-0.5\n"))
    dataset = load("usps", folder=tmp_path)
    assert dataset.inputs.shape == (3, 1, 16, 16)
    assert dataset.inputs[0, 0, 0, :3].tolist() == [0, 255, 128]
    assert int(dataset.inputs[0, 0, 15, 15]) == 191
    assert int(dataset.inputs[2, 0, 0, 15]) == 64
    assert labels_of(dataset, test=False) == [6, 9]
    assert labels_of(dataset, test=True) == [0]
    (tmp_path / "usps/usps.t.bz2").write_bytes(bz2.compress(b"1 16:-0.5\n3 zwei\n"))
    with pytest.raises(UserError, match=r"usps\.t\.bz2: line 2 is not in libsvm's format"):
        load("usps", folder=tmp_path)


def test_styles_are_joined_by_plus(tmp_path: Path) -> None:
    for name in ("svhn", "mnist-m"):
        (tmp_path / f"{name}-subset").mkdir()
        for part in ("train", "test"):
            np.savez(tmp_path / f"{name}-subset/{part}.npz", x=pixels(4, 32, 32, 3), y=np.arange(4))
    write_usps_h5(tmp_path)
    dataset = load("svhn+usps+mnist-m", folder=tmp_path)
    assert dataset.inputs.shape == (8 + 5 + 8, 3, 32, 32)
    assert dataset.group_names == ("svhn", "usps", "mnist-m")
    assert load("svhn+usps", folder=tmp_path, size=16).inputs.shape == (13, 3, 16, 16)


def test_cinic10_counts_validation_as_training(tmp_path: Path, write_picture: Callable[..., None]) -> None:
    for split in ("train", "valid", "test"):
        for name in ("cat", "dog"):
            write_picture(tmp_path / f"cinic10/{split}/{name}/1.png", (1, 2, 3), size=(32, 32))
    dataset = load("cinic10", folder=tmp_path)
    assert dataset.inputs.shape == (6, 3, 32, 32)
    assert labels_of(dataset, test=False) == [0, 1, 0, 1]
    assert labels_of(dataset, test=True) == [0, 1]
    assert dataset.name == "cinic10"


@pytest.mark.parametrize(
    ("name", "root", "styles"),
    [
        ("office-home", "OfficeHomeDataset_10072016", ("Art", "Clipart", "Product", "Real World")),
        ("adaptiope", "Adaptiope", ("product_images", "real_life", "synthetic")),
    ],
)
def test_styles_of_office_home_and_adaptiope_are_groups(
    tmp_path: Path, write_picture: Callable[..., None], name: str, root: str, styles: tuple[str, ...]
) -> None:
    for i, style in enumerate(styles):
        for thing in ("Bed", "Mug"):
            write_picture(tmp_path / root / style / thing / "0001.jpg", (50 * i, 0, 0), size=(20 + i, 30))
    dataset = load(name, folder=tmp_path, size=8)
    assert dataset.inputs.shape == (2 * len(styles), 3, 8, 8)
    assert dataset.group_names == styles
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [g for g in range(len(styles)) for _ in range(2)]
    assert dataset.classes == ("Bed", "Mug")
    assert abs(int(dataset.inputs[2, 0, 4, 4]) - 50) <= 3
    with pytest.raises(UserError, match=r"set data\.size"):
        load(name, folder=tmp_path)
