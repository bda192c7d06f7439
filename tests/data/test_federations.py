"""Datasets with natural clients, read from small files of the original form."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data import federate, load

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def heart(folder: Path, patients: int = 12) -> Path:
    rng = np.random.default_rng(0)
    for hospital in HOSPITALS:
        lines = []
        for patient in range(patients):
            row = [40 + patient, patient % 2, 1 + patient % 4, *rng.integers(90, 200, 2), 0, patient % 3, 150, 0, 1.5]
            lines.append(",".join(map(str, [*row, "?", "?", "?", 0 if patient % 3 else 1 + patient % 4])))
        lines.append("60,1,4,?,260,0,1,112,1,3,2,?,?,2")  # a patient with a missing value
        (folder / "heart-disease").mkdir(parents=True, exist_ok=True)
        (folder / f"heart-disease/processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return folder


def spoken(folder: Path) -> Path:
    place = folder / "free-spoken-digit-dataset/recordings"
    place.mkdir(parents=True)
    for speaker, low in (("theo", 200), ("lucas", 300)):
        for digit in (0, 3, 9):
            for number in range(8):
                sound = np.sin(np.arange(3000) * (low + 60 * digit + number) / 4000)
                wavfile.write(place / f"{digit}_{speaker}_{number}.wav", 8000, (9000 * sound).astype(np.int16))
    return folder


def drawing(character: int, drawer: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(100 * character + drawer).integers(0, 2, (105, 105)) > 0)


def omniglot(folder: Path) -> Path:
    for part, alphabet, number in (("background", "Greek", 394), ("evaluation", "Tibetan", 1500)):
        for character in (1, 2):
            place = folder / f"omniglot/images_{part}/{alphabet}/character0{character}"
            place.mkdir(parents=True)
            for drawer in range(1, 21):
                drawing(number + character, drawer).save(place / f"{number + character:04}_{drawer:02}.png")
    return folder


def femnist(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        data = {
            f"f{writer:04}_{writer}": {
                "x": (rng.integers(0, 256, (count, 784)) / 255).tolist(), "y": [writer, *range(10, 9 + count)]
            }
            for writer in range(3)
        }  # fmt: skip
        (folder / "femnist" / part).mkdir(parents=True)
        content = {"users": list(data), "num_samples": [count] * 3, "user_data": data}
        (folder / f"femnist/{part}/all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))
    return folder


def har(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, people in (("train", (1, 3, 30)), ("test", (2, 4))):
        place = folder / f"UCI HAR Dataset/{part}"
        place.mkdir(parents=True)
        owners = np.repeat(people, 12)
        np.savetxt(place / f"X_{part}.txt", rng.uniform(-1, 1, (len(owners), 561)), fmt="%16.7e")
        np.savetxt(place / f"y_{part}.txt", 1 + np.arange(len(owners)) % 6, fmt="%d")
        np.savetxt(place / f"subject_{part}.txt", owners, fmt="%d")
    return folder


@pytest.mark.parametrize(
    ("name", "make", "shape", "classes", "clients", "tested"),
    [
        ("fed-heart", heart, (48, 13), 2, ("Cleveland", "Budapest", "Switzerland", "Long Beach"), 20),
        ("spoken-digits", spoken, (48, 1, 32, 61), 10, ("lucas", "theo"), 30),
        ("omniglot", omniglot, (80, 1, 28, 28), 4, tuple(f"{drawer:02}" for drawer in range(1, 21)), 0),
        ("femnist", femnist, (24, 1, 28, 28), 62, ("f0000_0", "f0001_1", "f0002_2"), 6),
        ("har", har, (60, 561), 6, tuple(f"person {number}" for number in (1, 2, 3, 4, 30)), 24),
    ],
)
def test_natural_clients_keep_their_names(
    tmp_path: Path, name: str, make: Callable[[Path], Path], shape: tuple[int, ...], classes: int,
    clients: tuple[str, ...], tested: int,
) -> None:  # fmt: skip
    dataset = load(name, folder=make(tmp_path))
    assert (dataset.name, tuple(dataset.inputs.shape), len(dataset.classes)) == (name, shape, classes)
    assert int(dataset.test.sum()) == tested
    federation = federate(dataset, clients=1, partition="natural", split="pooled:0.5:0.25", minimum=1, seed=0)
    assert federation.names == clients
    assert all(map(len, federation.train)) and all(map(len, federation.validation)) and all(map(len, federation.test))


def owned(dataset: Dataset, client: str) -> torch.Tensor:
    assert dataset.groups is not None
    return dataset.groups == dataset.group_names.index(client)


def test_heart_is_prepared_as_by_flamby(tmp_path: Path) -> None:
    dataset = load("fed-heart", folder=heart(tmp_path))
    for hospital in dataset.group_names:
        mine = owned(dataset, hospital)
        assert int(mine.sum()) == 12  # the patient with a missing value is left out
        train = dataset.inputs[mine & ~dataset.test]
        assert torch.allclose(train.mean(0), torch.zeros(13), atol=1e-5)
        varied = train.std(0) > 0
        assert torch.allclose(train.std(0)[varied], torch.ones(int(varied.sum())), atol=1e-5)
        assert dataset.labels[mine].tolist() == [int(patient % 3 == 0) for patient in range(12)]
    assert (dataset.inputs[:, [4, 5, 6, 7]] == 0).all()  # columns that are constant at a hospital
    pain = dataset.inputs[:12, 8:11]  # kinds 2 to 4; kind 1 is the reference
    assert [int((pain[:, kind] > 0).sum()) for kind in range(3)] == [3, 3, 3]
    assert [patient % 4 for patient in (pain[:, 0] > 0).nonzero()[:, 0].tolist()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,2,3", "line 14 has 3 values instead of 14; download it again"),
        ("60,1,4,x,260,0,1,112,1,3,2,?,?,2", "line 14 has a value that is not a number"),
        ("60,1,9,120,260,0,1,112,1,3,2,?,?,2", r"column 3 must have the values \(1, 2, 3, 4\)"),
    ],
)
def test_damaged_heart_files_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = heart(tmp_path) / "heart-disease/processed.va.data"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=rf"processed\.va\.data: {words}"):
        load("fed-heart", folder=tmp_path)


def test_spoken_digits_have_their_official_test_set_and_options(tmp_path: Path) -> None:
    dataset = load("spoken-digits", folder=spoken(tmp_path), mels=16, seconds=0.5)
    assert dataset.inputs.shape == (48, 1, 16, 30)
    assert sorted(set(dataset.labels.tolist())) == [0, 3, 9]
    assert [int(dataset.test[owned(dataset, speaker)].sum()) for speaker in ("lucas", "theo")] == [15, 15]
    place = tmp_path / "free-spoken-digit-dataset/recordings"
    (place / "0_theo_0.wav").write_bytes(b"")
    assert len(load("spoken-digits", folder=tmp_path, on_bad="skip")) == 47
    (place / "0_theo_0.wav").rename(place / "x_theo_0.wav")
    with pytest.raises(UserError, match="'x' is not a digit"):
        load("spoken-digits", folder=tmp_path)


def test_omniglot_is_the_same_from_archives(tmp_path: Path) -> None:
    folders = load("omniglot", folder=omniglot(tmp_path / "folders"))
    assert folders.classes == tuple(f"{a}/character0{c}" for a in ("Greek", "Tibetan") for c in (1, 2))
    (tmp_path / "zips/omniglot").mkdir(parents=True)
    for part in ("background", "evaluation"):
        root = tmp_path / "folders/omniglot"
        with zipfile.ZipFile(tmp_path / f"zips/omniglot/images_{part}.zip", "w") as archive:
            for file in sorted((root / f"images_{part}").rglob("*.png")):
                archive.write(file, file.relative_to(root))
    zipped = load("omniglot", folder=tmp_path / "zips")
    assert torch.equal(zipped.inputs, folders.inputs) and torch.equal(zipped.labels, folders.labels)
    (tmp_path / "zips/omniglot/images_evaluation.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"images_evaluation\.zip: cannot be read as a zip file"):
        load("omniglot", folder=tmp_path / "zips")


def test_the_smaller_parts_of_omniglot_may_overlap(tmp_path: Path) -> None:
    for part in ("small1", "small2"):
        place = tmp_path / f"omniglot/images_background_{part}/Greek/character01"
        place.mkdir(parents=True)
        drawing(1, 1).save(place / "0395_01.png")
    assert len(load("omniglot", folder=tmp_path)) == 1


def test_femnist_has_the_values_of_leaf(tmp_path: Path) -> None:
    dataset = load("femnist", folder=femnist(tmp_path))
    stored = json.loads(next((tmp_path / "femnist/train").glob("*.json")).read_text())
    mine = owned(dataset, "f0001_1") & ~dataset.test
    expected = np.array(stored["user_data"]["f0001_1"]["x"]) * 255
    assert np.allclose(dataset.inputs[mine].flatten(1).numpy(), expected)
    assert [dataset.classes[label] for label in dataset.labels[mine]] == ["1", "A", "B", "C", "D", "E"]
    (tmp_path / "femnist/test").rename(tmp_path / "femnist/all_data")
    assert len(load("femnist", folder=tmp_path)) == 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ('{"users": ["a"]}', "user_data is missing"),
        ('{"users": ["a"], "user_data": {}}', "the writer 'a' has no user_data"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1]}}}', "has not 784 values"),
        ('{"users": [], "user_data": {}}', "has no samples"),
    ],
)
def test_damaged_femnist_files_are_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "femnist/all_data").mkdir(parents=True)
    (tmp_path / "femnist/all_data/all_data_0.json").write_text(content)
    with pytest.raises(UserError, match=f"all_data_0.json.*{words}.*preprocess.sh"):
        load("femnist", folder=tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("X", "1 2 3\n", "expected lines of 561 numbers"),
        ("X", "1 x\n", "cannot be read as lines of numbers"),
        ("y", "7\n" * 36, "expected 36 whole numbers from 1 to 6"),
        ("subject", "1\n", "expected 36 whole numbers"),
    ],
)
def test_damaged_har_files_are_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    (har(tmp_path) / f"UCI HAR Dataset/train/{file}_train.txt").write_text(content)
    with pytest.raises(UserError, match=rf"{file}_train\.txt: {words}"):
        load("har", folder=tmp_path)
