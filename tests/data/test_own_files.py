"""A user's own images: folders and .npz files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.core.errors import UserError
from fedloom.data import from_arrays, load
from fedloom.inference.pictures import labelled_pictures

Picture = Callable[..., None]


def test_classes_are_folders(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "shop/apple/b.png", (200, 0, 0))
    write_picture(tmp_path / "shop/apple/a.JPEG", (0, 0, 0))
    write_picture(tmp_path / "shop/pear/c.png", (0, 90, 0))
    (tmp_path / "shop/notes.txt").write_text("not a picture")
    write_picture(tmp_path / "shop/.trash/x.png", (0, 0, 0))
    dataset = load(str(tmp_path / "shop"))
    assert (dataset.name, dataset.classes) == ("shop", ("apple", "pear"))
    assert dataset.inputs.shape == (3, 3, 4, 6)
    assert dataset.labels.tolist() == [0, 0, 1]
    assert dataset.inputs[1:, :, 0, 0].tolist() == [[200, 0, 0], [0, 90, 0]]
    assert dataset.groups is None
    assert not bool(dataset.test.any())


def test_a_path_may_be_relative_to_the_data_folder(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "mine/shop/apple/b.png", (200, 0, 0))
    assert len(load("mine/shop", folder=tmp_path)) == 1


def test_train_and_test_folders_are_the_official_split(tmp_path: Path, write_picture: Picture) -> None:
    for place in ("train/a/1", "train/b/2", "test/b/3"):
        write_picture(tmp_path / f"x/{place}.png", (0, 0, 0))
    dataset = load(str(tmp_path / "x"))
    assert dataset.classes == ("a", "b")
    assert dataset.labels[dataset.test].tolist() == [1]
    assert int((~dataset.test).sum()) == 2


def test_clients_are_folders_of_class_folders(tmp_path: Path, write_picture: Picture) -> None:
    for place in ("bern/cat/1", "bern/dog/2", "oslo/dog/3"):
        write_picture(tmp_path / f"x/{place}.png", (0, 0, 0))
    dataset = load(str(tmp_path / "x"))
    assert dataset.classes == ("cat", "dog")
    assert dataset.group_names == ("bern", "oslo")
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [0, 0, 1]
    assert dataset.labels.tolist() == [0, 1, 1]


def test_clients_may_stand_under_train_and_test(tmp_path: Path, write_picture: Picture) -> None:
    for place in ("train/bern/cat/1", "train/oslo/dog/2", "test/oslo/cat/3"):
        write_picture(tmp_path / f"x/{place}.png", (0, 0, 0))
    dataset = load(str(tmp_path / "x"))
    assert dataset.group_names == ("bern", "oslo")
    assert dataset.groups is not None
    assert dataset.groups[dataset.test].tolist() == [1]


def test_folder_names_in_other_unicode_forms_are_the_same_class_and_client(
    tmp_path: Path, write_picture: Picture
) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for place in (f"z\u00fcrich/{composed}/1", f"z\u00fcrich/{decomposed}/2", f"zu\u0308rich/{decomposed}/3"):
        write_picture(tmp_path / f"x/{place}.png", (0, 0, 0))
    dataset = load(str(tmp_path / "x"))
    assert dataset.classes == (composed,)
    assert dataset.group_names == ("z\u00fcrich",)
    assert dataset.labels.tolist() == [0, 0, 0]


def test_classes_that_differ_only_by_case_are_refused(tmp_path: Path, write_picture: Picture) -> None:
    for place in ("bern/Cat/1", "bern/dog/2", "oslo/cat/3"):
        write_picture(tmp_path / f"x/{place}.png", (0, 0, 0))
    with pytest.raises(UserError, match=r"'Cat' and 'cat' differ only by case; move the pictures .* rename one"):
        load(str(tmp_path / "x"))
    for place in ("Cat/1", "cat/2"):
        write_picture(tmp_path / f"y/{place}.png", (0, 0, 0))
    with pytest.raises(UserError, match=r"--images .*'Cat' and 'cat' differ only by case"):
        labelled_pictures(tmp_path / "y", (3, 4, 4))


def test_images_are_grey_only_if_all_are(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "x/a/1.png", 80, mode="L")
    write_picture(tmp_path / "x/a/2.png", 1, mode="1")
    write_picture(tmp_path / "x/a/3.png", (90, 128), mode="LA")
    dataset = load(str(tmp_path / "x"))
    assert dataset.inputs[:, :, 0, 0].tolist() == [[80], [255], [90]]
    write_picture(tmp_path / "x/a/4.png", (10, 20, 30, 255), mode="RGBA")
    dataset = load(str(tmp_path / "x"))
    assert dataset.inputs[:, :, 0, 0].tolist() == [[80] * 3, [255] * 3, [90] * 3, [10, 20, 30]]


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 0x8012, np.uint16)).save(tmp_path / "x/a/1.png")
    Image.fromarray(np.full((4, 4), 0x0012, np.uint16)).save(tmp_path / "x/a/2.png")
    Image.fromarray(np.full((4, 4), 0x4012, np.uint16)).save(tmp_path / "x/a/3.png")
    dataset = load(str(tmp_path / "x"))
    assert dataset.inputs.dtype == torch.float32 and dataset.inputs.shape == (3, 1, 4, 4)
    assert dataset.inputs[:, 0, 0, 0].tolist() == [1, 0, 0.5]
    assert dataset.notes == ("grey values of more than 8 bits, 18 to 32786 in all images, were scaled to 0 to 1",)
    assert load(str(tmp_path / "x"), size=2).inputs.shape == (3, 1, 2, 2)


def test_sixteen_bit_and_float_tiffs_keep_their_depth(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / "x" / kind).mkdir(parents=True)
        (tmp_path / "y" / kind).mkdir(parents=True)
    Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4)).save(tmp_path / "x/a/1.tif")
    Image.fromarray(np.full((4, 4), 1515, np.uint16)).save(tmp_path / "x/b/1.tif")
    assert load(str(tmp_path / "x")).inputs[0].flatten().tolist() == pytest.approx([i / 1515 for i in range(16)])
    Image.fromarray(np.full((4, 4), -0.5, np.float32)).save(tmp_path / "y/a/1.tif")
    Image.fromarray(np.full((4, 4), 1.5, np.float32)).save(tmp_path / "y/b/1.tif")
    assert load(str(tmp_path / "y")).inputs.unique().tolist() == [0, 1]
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "y/b/2.tif")
    with pytest.raises(UserError, match=r"b/2\.tif: cannot be read .*NaN"):
        load(str(tmp_path / "y"))


def test_images_of_mixed_depth_are_refused(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "x/a/1.png", 80, size=(4, 4), mode="L")
    Image.fromarray(np.full((4, 4), 900, np.uint16)).save(tmp_path / "x/a/2.png")
    with pytest.raises(
        UserError, match=r"2\.png has grey values of more than 8 bits, .*1\.png has 8 bits .1 and 1 files"
    ):
        load(str(tmp_path / "x"))


def test_mixed_sizes_name_two_files_and_the_remedy(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "x/a/1.png", (9, 9, 9), size=(6, 4))
    write_picture(tmp_path / "x/b/2.png", (9, 9, 9), size=(5, 4))
    with pytest.raises(UserError, match=r"a/1\.png is 6×4, .*b/2\.png is 5×4; set data\.size"):
        load(str(tmp_path / "x"))
    dataset = load(str(tmp_path / "x"), size=3)
    assert dataset.inputs.shape == (2, 3, 3, 3)
    assert dataset.inputs.unique().tolist() == [9]


def test_truncated_and_fake_pictures_are_named(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    path = tmp_path / "x/a/1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(UserError, match=r"a/1\.png: cannot be read as an image \(.+\)"):
        load(str(tmp_path / "x"))
    path.write_text("hello")
    with pytest.raises(UserError, match=r"a/1\.png: cannot be read as an image \(.+\)"):
        load(str(tmp_path / "x"))


@pytest.mark.parametrize("places", [["1.png"], ["a/1.png", "b/c/2.png"], ["a/b/c/d/1.png"]])
def test_folders_of_no_known_shape_are_refused(tmp_path: Path, write_picture: Picture, places: list[str]) -> None:
    for place in places:
        write_picture(tmp_path / "x" / place, (0, 0, 0))
    with pytest.raises(UserError, match=f"expected class/picture or client/class/picture .*{places[0]}"):
        load(str(tmp_path / "x"))


def test_an_empty_folder_and_a_wrong_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no pictures in it"):
        load(str(tmp_path))
    with pytest.raises(UserError, match="no such folder or file"):
        load(str(tmp_path / "nowhere"))
    (tmp_path / "x.txt").write_text("1,2")
    with pytest.raises(UserError, match=r"a file must be an \.npz, \.csv, \.parquet"):
        load(str(tmp_path / "x.txt"))


X = np.random.default_rng(1).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("x", [X, X.transpose(0, 3, 1, 2)])
def test_npz_channels_are_found_first_or_last(tmp_path: Path, x: np.ndarray) -> None:
    np.savez(tmp_path / "own.npz", x=x, y=Y)
    dataset = load(str(tmp_path / "own.npz"))
    assert np.array_equal(dataset.inputs.numpy(), X.transpose(0, 3, 1, 2))
    assert dataset.labels.tolist() == Y.tolist()
    assert (dataset.name, dataset.classes) == ("own", ("0", "1", "2"))


def test_npz_may_have_a_test_set_groups_and_names(tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "own.npz",
        x_train=X[:4, ..., 0],
        y_train=Y[:4, None],
        x_test=X[4:, ..., 0],
        y_test=Y[4:, None],
        groups_train=np.array(["oslo", "bern", "oslo", "bern"]),
        groups_test=np.array(["bern", "oslo"]),
        classes=np.array(["a", "b", "c", "d"]),
    )
    dataset = load("own.npz", folder=tmp_path)
    assert dataset.inputs.shape == (6, 1, 5, 4)
    assert dataset.test.tolist() == [False] * 4 + [True] * 2
    assert dataset.group_names == ("bern", "oslo")
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [1, 0, 1, 0, 0, 1]
    assert dataset.classes == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, r"has no 'y' \(it has: x\)"),
        ({"x": np.array(["a"] * 6), "y": Y}, "x must be numbers, not <U1"),
        ({"x": np.arange(6), "y": Y}, r"x has shape \[6\]; expected"),
        ({"x": X.reshape(6, 5, 2, 6), "y": Y}, "x has shape .* with 1 or 3 channels"),
        ({"x": np.where(X > 9, X, np.nan), "y": Y}, "6 of 6 samples contain NaN or infinity"),
        ({"x": np.full((6, 2), 1e300), "y": Y}, "6 of 6 samples contain NaN or infinity"),
        ({"x_train": X, "y_train": Y, "x_test": X / 255, "y_test": Y}, "differ in shape"),
        (
            {"x_train": X[..., 0] / 1, "y_train": Y, "x_test": X[..., 0] > 9, "y_test": Y},
            "is float64, but x_test is bool",
        ),
        ({"x": X, "y": Y[:5]}, "y must be 6 labels"),
        ({"x": X, "y": Y / 2}, "labels must be whole numbers or texts"),
        ({"x": X, "y": np.array([0, 1, np.nan] * 2)}, "2 of 6 labels are missing"),
        ({"x": X, "y": Y - 1, "classes": np.array(["a", "b", "c"])}, "label -1 of sample 0"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "label 2 of sample 2"),
        ({"x": X, "y": Y, "groups": np.zeros(2)}, "2 groups for 6 samples"),
        ({"x": np.array([print], dtype=object), "y": Y}, "plain arrays"),
    ],
)
def test_npz_files_that_do_not_fit_are_named(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(UserError, match=words):
        load(str(tmp_path / "own.npz"))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16, bool])
def test_an_npz_may_hold_inputs_of_any_shape(tmp_path: Path, kind: type) -> None:
    x = (X[..., 0] % 7).astype(kind)
    np.savez(tmp_path / "own.npz", x=x, y=np.array(["b", "a", "b", "a", "b", "c"]), clients=["n", "s"] * 3)
    dataset = load(str(tmp_path / "own.npz"))
    assert dataset.inputs.dtype == torch.float32
    assert np.array_equal(dataset.inputs.numpy(), x.astype(np.float32))
    assert (dataset.classes, dataset.labels.tolist()) == (("a", "b", "c"), [1, 0, 1, 0, 1, 2])
    assert dataset.group_names == ("n", "s")


def test_sixteen_bit_images_in_an_npz_keep_their_values(tmp_path: Path) -> None:
    x = X.astype(np.uint16) * 200
    np.savez(tmp_path / "own.npz", x=x, y=Y)
    dataset = load(str(tmp_path / "own.npz"))
    assert np.array_equal(dataset.inputs.numpy(), x.transpose(0, 3, 1, 2).astype(np.float32))
    assert torch.equal(dataset.inputs, from_arrays(x, Y).inputs)


def test_labels_with_gaps_make_no_classes_without_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y * 1000)
    dataset = load(str(tmp_path / "own.npz"))
    assert (dataset.classes, dataset.labels.tolist()) == (("0", "1000", "2000"), Y.tolist())


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    content = (tmp_path / "own.npz").read_bytes()
    (tmp_path / "own.npz").write_bytes(content[:200])
    with pytest.raises(UserError, match=r"own\.npz: cannot be read"):
        load(str(tmp_path / "own.npz"))
