"""Decoding of picture files: EXIF orientation, and files that cannot be read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

import fedloom
from fedloom.core.errors import UserError
from fedloom.data import decode, federate, load
from fedloom.inference.pictures import read_pictures

ARROW = np.add.outer(np.arange(6) * 30, np.arange(9) * 10).astype(np.uint8)  # unlike each of its transpositions
TURNED = {
    1: ARROW, 2: ARROW[:, ::-1], 3: ARROW[::-1, ::-1], 4: ARROW[::-1], 5: ARROW.T, 6: np.rot90(ARROW, -1),
    7: np.rot90(ARROW.T, 2), 8: np.rot90(ARROW),
}  # fmt: skip


def save(path: Path, pixels: np.ndarray, orientation: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if path.suffix == ".webp" else {}
    Image.fromarray(pixels).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_training_and_prediction_read_images_upright(tmp_path: Path, orientation: int, ending: str) -> None:
    path = save(tmp_path / f"x/a/1.{ending}", ARROW, orientation)
    expected = TURNED[orientation]
    assert np.array_equal(load(str(tmp_path / "x")).inputs[0, 0].numpy(), expected)
    assert np.array_equal(read_pictures([path], (1, *expected.shape)).images[0, 0].numpy(), expected)


def test_sixteen_bit_images_are_turned_too(tmp_path: Path) -> None:
    save(tmp_path / "x/a/1.png", ARROW.astype(np.uint16) << 8, 6)
    assert np.allclose(load(str(tmp_path / "x")).inputs[0, 0].numpy(), TURNED[6] / TURNED[6].max())


def test_a_large_jpeg_is_turned_and_decoded_at_a_smaller_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y, x = np.mgrid[:320, :480]
    path = save(tmp_path / "1.jpg", (x / 480 * 200 + y / 320 * 50).astype(np.uint8), 6)
    whole = np.asarray(ImageOps.exif_transpose(Image.open(path)).resize((32, 48), Image.Resampling.BILINEAR))
    monkeypatch.setattr(decode, "LARGE", 1000)
    scales = []
    draft = JpegImageFile.draft
    monkeypatch.setattr(JpegImageFile, "draft", lambda *args: scales.append(args[2]) or draft(*args))
    small = read_pictures([path], (1, 48, 32)).images[0, 0].numpy()
    assert scales == [(96, 64)]  # of the file as it is stored, which lies on its side
    assert np.abs(small.astype(int) - whole).max() <= 2


def test_sizes_are_compared_upright(tmp_path: Path) -> None:
    save(tmp_path / "x/a/1.png", ARROW, 8)
    save(tmp_path / "x/a/2.png", np.ascontiguousarray(ARROW.T), 1)
    assert load(str(tmp_path / "x")).inputs.shape == (2, 1, 9, 6)


def test_damaged_exif_data_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    damaged = (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    for number, exif in enumerate(damaged):
        Image.fromarray(ARROW).save(tmp_path / f"x/a/{number}.png", exif=exif)
    assert (load(str(tmp_path / "x")).inputs[:, 0].numpy() == ARROW).all()


def damaged_folder(root: Path, bad: int) -> Path:
    """Nine good pictures of two classes, numbered in their pixels, and bad ones: some cut off, some not pictures."""
    for number in range(9):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 4), 10 * number).save(folder / f"{number:02}.png")
    noise = np.random.default_rng(0).integers(0, 255, (4, 5), dtype=np.uint8)
    for number in range(bad):
        path = root / f"a/bad{number:02}.png"
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:50] if number % 2 else b"hello")
    return root


def test_all_files_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    root = damaged_folder(tmp_path / "x", 3)
    with pytest.raises(UserError) as caught:
        load(str(root))
    said = str(caught.value)
    assert said.splitlines() == [
        "3 of 12 files cannot be read as images; replace or remove them, or set data.on_bad = skip:",
        f"{root}/a/bad00.png (cannot identify image file)",
        f"{root}/a/bad01.png (image file is truncated)",
        f"{root}/a/bad02.png (cannot identify image file)",
    ]


def test_at_most_twenty_files_are_named(tmp_path: Path) -> None:
    root = damaged_folder(tmp_path / "x", 23)
    with pytest.raises(UserError, match=r"(?s)^23 of 32 files .*/bad19\.png \([^)]+\)\nand 3 more$"):
        load(str(root))


def test_files_that_cannot_be_read_may_be_left_out(tmp_path: Path) -> None:
    dataset = load(str(damaged_folder(tmp_path / "x", 2)), on_bad="skip")
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7]
    assert dataset.inputs[:, 0, 0, 0].tolist() == [10 * number for number in order]
    assert dataset.labels.tolist() == [number % 2 for number in order]
    (note,) = dataset.notes
    assert note.startswith("2 of 11 files cannot be read and are left out (data.on_bad = skip): ")
    assert "a/bad00.png (" in note
    assert "a/bad01.png (" in note
    assert federate(dataset, clients=2, partition="iid", minimum=1, seed=0).notes == (note,)


def test_a_folder_without_a_readable_file_is_refused_either_way(tmp_path: Path) -> None:
    (tmp_path / "x/a").mkdir(parents=True)
    (tmp_path / "x/a/1.png").write_text("hello")
    with pytest.raises(UserError, match="cannot be read as an image"):
        load(str(tmp_path / "x"), on_bad="skip")


def test_a_run_names_the_files_that_it_left_out(tmp_path: Path) -> None:
    root = damaged_folder(tmp_path / "x", 2)
    fields = {"data.name": str(root), "clients": 2, "partition": "iid", "model": "mlp", "rounds": 1, "epochs": 1}
    with pytest.raises(UserError, match=r"2 of 11 files cannot be read"):
        fedloom.run(**fields, out=tmp_path / "run")
    summary = fedloom.run(**fields, **{"data.on_bad": "skip"}, out=tmp_path / "run")
    assert any("2 of 11 files" in note and "bad01.png" in note for note in summary["notes"])
