"""A user's own images: folders and .npz files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import UserError
from fedloom.data import load
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
    assert dataset.images.shape == (3, 3, 4, 6)
    assert dataset.labels.tolist() == [0, 0, 1]
    assert dataset.images[1:, :, 0, 0].tolist() == [[200, 0, 0], [0, 90, 0]]
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
    assert dataset.images[:, :, 0, 0].tolist() == [[80], [255], [90]]
    write_picture(tmp_path / "x/a/4.png", (10, 20, 30, 255), mode="RGBA")
    dataset = load(str(tmp_path / "x"))
    assert dataset.images[:, :, 0, 0].tolist() == [[80] * 3, [255] * 3, [90] * 3, [10, 20, 30]]


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 0x8012, np.uint16)).save(tmp_path / "x/a/1.png")
    assert load(str(tmp_path / "x")).images.unique().tolist() == [0x80]


def test_mixed_sizes_name_two_files_and_the_remedy(tmp_path: Path, write_picture: Picture) -> None:
    write_picture(tmp_path / "x/a/1.png", (9, 9, 9), size=(6, 4))
    write_picture(tmp_path / "x/b/2.png", (9, 9, 9), size=(5, 4))
    with pytest.raises(UserError, match=r"a/1\.png is 6×4, .*b/2\.png is 5×4; set data\.size"):
        load(str(tmp_path / "x"))
    dataset = load(str(tmp_path / "x"), size=3)
    assert dataset.images.shape == (2, 3, 3, 3)
    assert dataset.images.unique().tolist() == [9]


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
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(UserError, match=r"a file must be an \.npz"):
        load(str(tmp_path / "x.csv"))


X = np.random.default_rng(1).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("x", [X, X.transpose(0, 3, 1, 2)])
def test_npz_channels_are_found_first_or_last(tmp_path: Path, x: np.ndarray) -> None:
    np.savez(tmp_path / "own.npz", x=x, y=Y)
    dataset = load(str(tmp_path / "own.npz"))
    assert np.array_equal(dataset.images.numpy(), X.transpose(0, 3, 1, 2))
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
    assert dataset.images.shape == (6, 1, 5, 4)
    assert dataset.test.tolist() == [False] * 4 + [True] * 2
    assert dataset.group_names == ("bern", "oslo")
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [1, 0, 1, 0, 0, 1]
    assert dataset.classes == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, r"has no 'y' \(it has: x\)"),
        ({"x": X / 255, "y": Y}, "x must be uint8 .* not float64"),
        ({"x": X[..., None], "y": Y}, "x has shape"),
        ({"x": X, "y": Y[:5]}, "y must be 6 whole numbers"),
        ({"x": X, "y": Y / 2}, "y must be 6 whole numbers"),
        ({"x": X, "y": Y - 1}, "label -1 of sample 0"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "label 2 of sample 2"),
        ({"x": X, "y": Y, "groups": np.zeros(2)}, "2 groups for 6 images"),
        ({"x": np.array([print], dtype=object), "y": Y}, "plain arrays"),
    ],
)
def test_npz_files_that_do_not_fit_are_named(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(UserError, match=words):
        load(str(tmp_path / "own.npz"))


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    content = (tmp_path / "own.npz").read_bytes()
    (tmp_path / "own.npz").write_bytes(content[:200])
    with pytest.raises(UserError, match=r"own\.npz: cannot be read"):
        load(str(tmp_path / "own.npz"))
