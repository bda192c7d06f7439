"""Files that declare what they do not have, or more than fits into memory: refused by name, before memory is taken."""

import bz2
import gzip
import io
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.core import limits
from fedloom.core.errors import UserError
from fedloom.data import load
from fedloom.data.decode import PIXELS, workers_for
from fedloom.data.sources import usps
from fedloom.inference.pictures import read_pictures


def refused(path: Path | str, *words: str, folder: Path | None = None) -> str:
    """What is said; little memory may be taken for it."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            load(str(path), folder=folder)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert len(said) < 1000
    return said


def npy(shape: tuple[int, ...], content: bytes, dtype: str = "|u1") -> bytes:
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def write_npz(path: Path, method: int = zipfile.ZIP_STORED, **arrays: bytes) -> bytes:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return path.read_bytes()


SMALL = {"x": npy((4, 2, 2), bytes(16)), "y": npy((4,), bytes([0, 1, 0, 1]))}


@pytest.mark.parametrize("shape", [(10**12, 28, 28), (2**62, 2**62, 2), (10**30, 1, 1)])
def test_an_npz_that_declares_more_images_than_it_has_is_refused_unread(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_npz(tmp_path / "own.npz", **SMALL | {"x": npy(shape, bytes(16))})
    refused(tmp_path / "own.npz", "own.npz", "x", "save")


def test_an_npz_that_would_not_fit_into_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: 10**6)
    zeros = {"x": npy((2000, 32, 32), bytes(2_048_000)), "y": npy((2000,), bytes(2000))}
    packed = write_npz(tmp_path / "own.npz", zipfile.ZIP_DEFLATED, **zeros)
    assert len(packed) < 10_000
    refused(tmp_path / "own.npz", "own.npz: x of shape [2000, 1, 32, 32]", "0.0 GB are free", "leave out samples")


def test_an_npz_takes_the_memory_of_its_images_once(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "own.npz", x=np.zeros((4000, 32, 32, 3), np.uint8), y=np.zeros(4000, np.int64))
    tracemalloc.start()
    assert load(str(tmp_path / "own.npz")).inputs.nbytes == 12_288_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000, peak


def test_an_npz_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_npz(tmp_path / "own.npz", zipfile.ZIP_DEFLATED, **SMALL)
    for end in range(0, len(whole), 7):
        (tmp_path / "own.npz").write_bytes(whole[:end])
        refused(tmp_path / "own.npz", "own.npz: cannot be read as a NumPy archive", "save it again")


@pytest.mark.parametrize(
    ("local", "central", "value"),
    [(6, 8, b"\x01\x00"), (6, 8, b"\x40\x00"), (8, 10, b"\x63\x00"), (8, 10, b"\x0e\x00"), (4, 6, b"\xff\xff")],
    ids=["encrypted", "strongly encrypted", "unknown compression", "LZMA", "version"],
)
def test_zip_flags_that_numpy_never_sets_are_refused(tmp_path: Path, local: int, central: int, value: bytes) -> None:
    data = bytearray(write_npz(tmp_path / "own.npz", **SMALL))
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = data.find(signature) + offset
        data[at : at + 2] = value
    (tmp_path / "own.npz").write_bytes(data)
    refused(tmp_path / "own.npz", "own.npz", "cannot be read", "save it again")


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for code in (0xD800, 0x7FFFFFFF):
        classes = npy((2,), struct.pack("<II", code, 66), "<U1")
        write_npz(tmp_path / "own.npz", **SMALL, classes=classes)
        refused(tmp_path / "own.npz", "own.npz", "cannot be read")


def mnist(folder: Path, images: bytes, ending: str = "") -> None:
    (folder / "mnist").mkdir(exist_ok=True)
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", 2) + bytes(2)
    small = bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 4, 4) + bytes(32)
    for part, x in (("train", images), ("t10k", small)):
        (folder / f"mnist/{part}-images-idx3-ubyte{ending}").write_bytes(gzip.compress(x) if ending else x)
        (folder / f"mnist/{part}-labels-idx1-ubyte{ending}").write_bytes(gzip.compress(labels) if ending else labels)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(("size", "has"), [(2**31, 32), (4, 31), (4, 33), (4, 10**6)])
def test_an_idx_file_that_declares_another_size_is_refused(tmp_path: Path, size: int, has: int, ending: str) -> None:
    mnist(tmp_path, bytes([0, 0, 8, 3]) + struct.pack(">III", 2, size, size) + bytes(has), ending)
    refused("mnist", f"train-images-idx3-ubyte{ending}", "download it again", folder=tmp_path)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_an_idx_file_cut_off_anywhere_is_refused(tmp_path: Path, ending: str) -> None:
    whole = bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 4, 4) + bytes(range(32))
    mnist(tmp_path, whole, ending)
    path = tmp_path / f"mnist/train-images-idx3-ubyte{ending}"
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        refused("mnist", path.name, "download it again", folder=tmp_path)


def test_a_few_bytes_of_gzip_that_stand_for_many_are_not_unpacked(tmp_path: Path) -> None:
    mnist(tmp_path, bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 4, 4) + bytes(5_000_000), ".gz")
    refused("mnist", "its header promises 48 bytes", folder=tmp_path)


def test_hdf5_that_declares_more_than_memory_is_refused_unread(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "usps").mkdir()
    with h5py.File(tmp_path / "usps/usps.h5", "w") as file:
        for part in ("train", "test"):
            file.create_dataset(f"{part}/data", (10**10, 256), "f4", chunks=(16, 256))
            file[f"{part}/target"] = np.zeros(3)
    assert (tmp_path / "usps/usps.h5").stat().st_size < 100_000
    refused("usps", "usps.h5: train/data of shape [10000000000, 256]", "GB", "download it again", folder=tmp_path)


def test_hdf5_that_points_outside_itself_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "usps").mkdir()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["train/data"], file["train/target"] = np.zeros((3, 256)), np.zeros(3)
    with h5py.File(tmp_path / "usps/usps.h5", "w") as file:
        file["train"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/train")
    refused("usps", "usps.h5", "train/data is missing or is a link", folder=tmp_path)


def svhn(folder: Path, change: Callable[[bytes], bytes], compressed: bool) -> None:
    from scipy.io import savemat

    (folder / "svhn").mkdir()
    for part in ("train", "test"):
        file = io.BytesIO()
        savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1))}, do_compression=compressed)
        (folder / f"svhn/{part}_32x32.mat").write_bytes(change(file.getvalue()))


def test_a_matlab_file_that_declares_more_than_it_has_is_refused(tmp_path: Path) -> None:
    shape = struct.pack("<iiii", 32, 32, 3, 2)
    svhn(tmp_path, lambda data: data.replace(shape, struct.pack("<iiii", 32000, 32000, 3, 200)), False)
    refused("svhn", "train_32x32.mat: cannot be read as a MATLAB file", "X of shape", folder=tmp_path)


def test_a_compressed_matlab_variable_is_unpacked_no_further_than_declared(tmp_path: Path) -> None:
    def bomb(data: bytes) -> bytes:
        (length,) = struct.unpack("<I", data[132:136])
        inside = zlib.decompress(data[136 : 136 + length])
        packed = zlib.compress(inside.replace(struct.pack("<iiii", 32, 32, 3, 2), bytes(16)) + bytes(30_000_000))
        return data[:128] + struct.pack("<II", 15, len(packed)) + packed

    svhn(tmp_path, bomb, True)
    refused("svhn", "train_32x32.mat: cannot be read as a MATLAB file", folder=tmp_path)


def test_libsvm_files_are_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn.datasets")  # imported here: it takes memory too
    (tmp_path / "usps").mkdir()
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / "usps" / name).write_bytes(bz2.compress(b"1 1:1\n" * 500_000))
    monkeypatch.setattr(limits, "free_memory", lambda: 10**9)
    refused("usps", "usps.bz2", "3.1 GB", "download it again", folder=tmp_path)
    monkeypatch.setattr(usps, "LINES", 10**6)
    refused("usps", "usps.bz2: has more than 1,000,000 bytes of text", folder=tmp_path)


def test_a_label_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    for name, line in (("usps.bz2", b"1.5 1:1\n"), ("usps.t.bz2", b"1 1:1\n")):
        (tmp_path / "usps" / name).write_bytes(bz2.compress(b"1 1:1\n" + line))
    refused("usps", "usps.bz2: the label of line 2 is 1.5, not a whole number", folder=tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a place in the memo for which the C unpickler takes 32 GB
        b"\x80\x02}(U\x04datacnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86U\x02u1tRu.",
        pickle.dumps({"data": np.array([[len]], dtype=object), "labels": [0]}, 2),
        pickle.dumps({"data": np.zeros(1, [("a", "u1")]), "labels": [0]}, 2),
        b"\x80\x02}(U\x04data" + b"]" * 5000 + b"a" * 4999 + b"U\x06labels]u.",
        b"\x80\x02" + b"}" * 100_000 + b".",
        b"\x8e" + b"\xff" * 8,
    ],
    ids=["memo", "a huge array", "objects", "fields", "nested", "many", "a huge text"],
)
def test_a_pickle_can_neither_run_nor_take_memory(tmp_path: Path, attack: bytes) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(attack)
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}))
    refused("cifar100", "cifar-100-python/train", "unpack the archive again", folder=tmp_path)


def png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares this size."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_pictures_with_too_many_pixels_are_refused_by_their_headers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(4):
        (tmp_path / f"a/{i}.png").write_bytes(png(13_000, 13_000))
    refused(tmp_path, "a/0.png", "13000×13000 pixels", f"at most {PIXELS:,} are allowed", "replace or remove them")
    pictures = read_pictures([tmp_path / "a/0.png"], (1, 8, 8))
    assert "13000×13000 pixels" in pictures.skipped[str(tmp_path / "a/0.png")]


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_for([(100, 100)], 10**6, "x") is None
    assert workers_for([(6000, 6000)], 10**6, "x") == 1
    monkeypatch.setattr(limits, "free_memory", lambda: 10**8)
    with pytest.raises(UserError, match=r"^x: the images would take 0\.6 GB, but only 0\.1 GB are free; use"):
        workers_for([(6000, 6000)], 10**6, "x")


def test_formats_that_other_programs_decode_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch ran)"
    )
    refused(tmp_path, "a/1.png: cannot be read as an image")


def test_free_memory_is_what_resource_limits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10, 10))
    assert limits.free_memory() == 0
