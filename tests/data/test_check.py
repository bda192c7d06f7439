"""`fedloom data check`: each problem is found, counted and explained; a sound folder has none."""

from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from using import DIGITS, PIXELS, invoke, last_line, refused, write_pictures

from fedloom.data.check import check_folder
from fedloom.data.findings import DataCheck, Finding
from fedloom.data.near_duplicates import hashes, near_duplicates
from fedloom.data.scan import bit_depth, scan, thumbnail


def photo(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """A smooth random picture in colour, unlike those of other seeds."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def shops(root: Path) -> Path:
    """Two clients with two classes of three pictures each, of one size, all different."""
    for number in range(12):
        folder = root / ("north", "south")[number % 2] / ("shirt", "shoe")[number // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        photo(number).save(folder / f"{number:02}.png")
    return root


def by_check(found: DataCheck) -> dict[str, Finding]:
    return {finding.check: finding for finding in found.findings}


def test_a_sound_folder_has_neither_errors_nor_warnings(tmp_path: Path) -> None:
    found = check_folder(shops(tmp_path))
    assert [finding.severity for finding in found.findings] == ["info"] * 3
    assert found.classes == {"shirt": 6, "shoe": 6}
    assert found.clients == {"north": 6, "south": 6}
    assert found.sizes == {"min": [96, 64], "median": [96, 64], "max": [96, 64], "distinct": 1}
    assert found.fixes == []


def test_every_problem_is_found_at_once(tmp_path: Path) -> None:
    root = shops(tmp_path)
    (root / "north/shirt/bad.png").write_text("hello")
    cut = root / "south/shoe/cut.jpg"
    photo(50).save(cut)
    cut.write_bytes(cut.read_bytes()[:600])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo(51).save(root / "south/shoe/turned.jpg", exif=exif)
    deep = np.asarray(photo(52).convert("L")).astype(np.uint16) << 8
    Image.fromarray(deep).save(root / "north/shirt/deep.png")
    Image.fromarray(np.asarray(photo(53).convert("L"), np.float32)).save(root / "north/shirt/float.tif")
    for number, place in enumerate(("north/Shoe", "west/caf\u00e9", "west/cafe\u0301")):
        (root / place).mkdir(parents=True)
        photo(54 + number).save(root / place / "1.png")
    (root / "east/shirt").mkdir(parents=True)
    (root / "south/hat").mkdir()
    (root / "south/notes.txt").write_text("x")
    photo(60).save(root / "south/lost.png")
    photo(0, (48, 32)).save(root / "south/shirt/copy.jpg", quality=85)  # north/shirt/00.png
    check = check_folder(root)
    found = by_check(check)
    counts = {check: (finding.severity, finding.count) for check, finding in found.items()}
    assert counts == {
        "misplaced files": ("error", 1),
        "classes that differ by case": ("error", 1),
        "unreadable": ("error", 2),
        "mixed depths": ("error", 2),
        "empty folders": ("warning", 2),
        "classes in several Unicode forms": ("warning", 1),
        "sizes": ("warning", 0),
        "clients with a single class": ("warning", 1),
        "near-duplicates across clients": ("warning", 2),
        "other files": ("info", 1),
        "EXIF orientation": ("info", 1),
        "class balance": ("info", 0),
        "clients": ("info", 0),
    }
    assert found["misplaced files"].examples == ("south/lost.png",)
    assert found["classes that differ by case"].examples == ("Shoe / shoe",)
    assert [fix.path for fix in check.fixes if fix.check == "classes that differ by case"] == ["Shoe / shoe"]
    assert found["unreadable"].examples[0].startswith("north/shirt/bad.png (cannot identify image file")
    assert found["empty folders"].examples == ("east", "south/hat")
    assert found["clients with a single class"].examples == ("west",)
    assert found["near-duplicates across clients"].examples == ("north/shirt/00.png = south/shirt/copy.jpg",)
    assert "1 with floats, 1 with 16 bits" in found["mixed depths"].text


def test_deep_grey_values_are_kept_and_deep_colours_are_not(tmp_path: Path) -> None:
    for number, kind in enumerate(("a", "b")):
        (tmp_path / "grey" / kind).mkdir(parents=True)
        deep = np.asarray(photo(number).convert("L")).astype(np.uint16) << 8
        Image.fromarray(deep).save(tmp_path / "grey" / kind / "1.png")
    found = by_check(check_folder(tmp_path / "grey"))["bit depth"]
    assert (found.severity, found.count) == ("info", 2)
    assert "kept as floats" in found.text


def test_near_duplicates_of_train_and_test_and_of_two_classes(tmp_path: Path) -> None:
    for number, place in enumerate(("train/a", "train/a", "train/b", "test/a", "test/b")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        photo(number).save(tmp_path / place / f"{number}.png")
    photo(0).save(tmp_path / "test/a/copy.jpg")
    photo(2).save(tmp_path / "train/a/copy.jpg")
    photo(1).save(tmp_path / "train/a/again.jpg")
    found = by_check(check_folder(tmp_path))
    assert found["near-duplicates in train and test"].examples == ("test/a/copy.jpg = train/a/0.png",)
    assert found["near-duplicates across classes"].examples == ("train/a/copy.jpg = train/b/2.png",)
    assert found["near-duplicates within a class"].severity == "info"
    assert "near-duplicates across clients" not in found


def test_uneven_classes_are_a_warning(tmp_path: Path) -> None:
    write_pictures(tmp_path, {1: 21, 2: 1})
    assert by_check(check_folder(tmp_path))["class balance"].severity == "warning"
    write_pictures(tmp_path, {2: 2})
    assert by_check(check_folder(tmp_path))["class balance"].text == (
        "2 classes of 2 ('digit 2') to 21 ('digit 1') pictures, median 12"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = shops(tmp_path / "shops")
    assert "12 pictures: no errors or warnings" in invoke("data", "check", root).stdout
    (root / "north/shirt/a\tb.png").write_text("hello")
    photo(0).save(root / "south/shirt/copy.png")
    result = invoke("data", "check", root, "--json", "--fix-list", tmp_path / "todo.tsv", code=1)
    found = last_line(result)
    assert (found["files"], found["errors"], found["warnings"]) == (14, 1, 1)
    assert found["findings"][0]["check"] == "unreadable"
    assert [line.split("\t") for line in (tmp_path / "todo.tsv").read_text().splitlines()] == [
        [r"north/shirt/a\tb.png", "unreadable", "replace or remove (cannot identify image file)"],
        *(
            [path, "near-duplicates across clients",
             "keep it at one client; group: north/shirt/00.png, south/shirt/copy.png"]
            for path in ("north/shirt/00.png", "south/shirt/copy.png")
        ),
    ]  # fmt: skip
    assert "no such file or folder" in refused(capsys, monkeypatch, "data", "check", str(tmp_path / "nowhere"))


def test_the_hash_compares_neighbours() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)
    expected = [image[r, c + 1] > image[r, c] for r in range(8) for c in range(8)]
    expected += [image[r + 1, c] > image[r, c] for r in range(8) for c in range(8)]
    assert hashes(image[None])[0].tolist() == expected


def test_different_digits_are_not_near_duplicates_but_their_copies_are() -> None:
    thumbnails = np.stack([thumbnail(Image.fromarray(pixels)) for pixels in PIXELS])
    assert len(DIGITS.target) == len(thumbnails)
    assert near_duplicates(thumbnails) == []
    brighter = np.clip(thumbnails[:5].astype(int) + 1, 0, 255).astype(np.uint8)
    groups = near_duplicates(np.concatenate([thumbnails, brighter, thumbnails[:2]]))
    count = len(thumbnails)
    assert [group.tolist() for group in sorted(groups, key=lambda g: g[0])] == [
        [i, count + i, *([count + 5 + i] if i < 2 else [])] for i in range(5)
    ]


def test_blank_pictures_are_not_compared() -> None:
    assert near_duplicates(np.full((4, 9, 9), 7, np.uint8)) == []


def test_turned_copies_have_the_same_thumbnail(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo(1).save(tmp_path / "upright.png")
    photo(1).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    facts = scan([tmp_path / "upright.png", tmp_path / "turned.png"])
    assert facts.sizes.tolist() == [[96, 64], [96, 64]]
    assert facts.turned.tolist() == [False, True]
    assert np.array_equal(facts.thumbnails[0], facts.thumbnails[1])


def test_bit_depths(tmp_path: Path) -> None:
    grey = photo(1).convert("L")
    pictures = {
        "1.png": (grey.convert("1"), 1), "8.png": (grey, 8), "p.png": (photo(1).convert("P"), 8),
        "rgb.jpg": (photo(1), 8),
        "16.png": (Image.fromarray(np.asarray(grey).astype(np.uint16) << 8), 16),
        "16.tif": (Image.fromarray(np.asarray(grey).astype(np.uint16) << 8), 16), "f.tif": (grey.convert("F"), -1),
        "i.tif": (grey.convert("I"), 32),
    }  # fmt: skip
    for name, (picture, expected) in pictures.items():
        picture.save(tmp_path / name)
        with Image.open(tmp_path / name) as opened:
            assert (name, bit_depth(opened)) == (name, expected)
