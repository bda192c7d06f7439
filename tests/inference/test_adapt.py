"""A new client's model out of a folder of pictures, and an honest word on how good it is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from using import DIGITS, PIXELS, invoke, last_line, write_pictures

import fedloom
from fedloom import UserError
from fedloom.inference.adapt import HEADS, adapt, interval, pick_shots, stratified_folds, temperature


@pytest.mark.parametrize("head", HEADS)
def test_a_folder_of_pictures_becomes_a_model(runs: dict[str, Path], tmp_path: Path, head: str) -> None:
    folder = write_pictures(tmp_path / "mine", {3: 12, 5: 12, 8: 12}, size=20)
    said = last_line(invoke("adapt", runs["repper"], "--images", folder, "--head", head, "--json"))
    assert said["classes"] == {"digit 3": 12, "digit 5": 12, "digit 8": 12}
    assert (said["how"], said["tested"], said["warnings"]) == ("5-fold", 36, [])
    assert said["low"] < said["accuracy"] <= said["high"]
    assert said["accuracy"] > 0.6 > said["majority"]
    model = fedloom.load_model(said["model"])
    assert model.classes == ("digit 3", "digit 5", "digit 8")
    unseen = [n for n in np.flatnonzero(np.isin(DIGITS.target, (3, 5, 8))) if n not in range(160)]
    right = model(PIXELS[unseen]).argmax(1).numpy() == np.searchsorted((3, 5, 8), DIGITS.target[unseen])
    assert right.mean() > 0.6
    assert model.probabilities(PIXELS[unseen]).sum(1) == pytest.approx(1)


def test_shots_are_fitted_on_and_all_others_tested(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", {0: 15, 1: 9})
    said = last_line(invoke("adapt", runs["fedavg"], "--images", folder, "--shots", 4, "--to", "out", "--json"))
    assert said["classes"] == {"digit 0": 4, "digit 1": 4}
    assert (said["how"], said["tested"], said["majority"]) == ("held out", 16, 11 / 16)
    assert said["model"] == "out/model.safetensors"
    assert "fewer than 10 images of 'digit 0' (4)" in said["warnings"][0]


def test_one_class_and_one_image_are_warned_of(runs: dict[str, Path], tmp_path: Path) -> None:
    one = write_pictures(tmp_path / "one", {4: 3})
    said = invoke("adapt", runs["fedavg"], "--images", one)
    assert "one class, 'digit 4'" in said.stderr
    single = write_pictures(tmp_path / "single", {4: 1})
    said = last_line(invoke("adapt", runs["fedavg"], "--images", single, "--json"))
    assert said["accuracy"] is None
    assert "accuracy is not known" in said["warnings"][-1]
    lonely = write_pictures(tmp_path / "lonely", {4: 1, 7: 1, 2: 11})
    (lonely / "digit 2" / "torn.png").write_bytes(b"not a picture")
    said = last_line(invoke("adapt", runs["fedavg"], "--images", lonely, "--head", "svm", "--json"))
    assert said["accuracy"] <= 11 / 13  # what has one image is never right
    found = " ".join(said["warnings"])
    assert "one image of 'digit 4', 'digit 7'" in found
    assert "no better than always predicting 'digit 2' (85%)" in found
    assert "torn.png (cannot identify image file)" in found


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("photo.png", "one subfolder of pictures per class, but found 'photo.png'"),
        ("notes.txt", "but found no pictures"),
    ],
)
def test_a_folder_without_classes_is_refused(runs: dict[str, Path], tmp_path: Path, inside: str, problem: str) -> None:
    (tmp_path / "flat").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "flat" / inside, format="png")
    with pytest.raises(UserError, match=problem):
        invoke("adapt", runs["fedavg"], "--images", tmp_path / "flat")
    with pytest.raises(UserError, match="--head mpl: did you mean 'mlp'"):
        invoke("adapt", runs["fedavg"], "--images", write_pictures(tmp_path / "good", {1: 2}), "--head", "mpl")


def test_noise_is_not_flattered(runs: dict[str, Path]) -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8))
    base = fedloom.load(runs["repper"]).representation()
    _, found = adapt(base, images, rng.permutation(np.arange(40) % 2), ("a", "b"), head="mlp")
    assert found.accuracy is not None and found.low is not None
    assert found.low < 0.5


def test_folds_hold_every_class_evenly_and_each_image_once() -> None:
    labels = np.repeat([0, 1, 2], [23, 11, 6])
    folds = stratified_folds(labels, 5, np.random.default_rng(0))
    assert sorted(np.concatenate([outer for _, outer in folds])) == list(range(40))
    for inner, outer in folds:
        assert not set(inner) & set(outer) and len(inner) + len(outer) == 40
        counts = np.bincount(labels[outer], minlength=3)
        assert (abs(counts - np.array([23, 11, 6]) / 5) < 1).all()


def test_shots_take_what_a_small_class_has() -> None:
    chosen, rest = pick_shots(np.array([0, 0, 0, 1]), 2, np.random.default_rng(0))
    assert sorted([*chosen, *rest]) == [0, 1, 2, 3]
    assert len(chosen) == 3 and 3 in chosen


def test_the_interval_is_wilson_s() -> None:
    assert interval(5, 5) == pytest.approx((0.5655, 1), abs=1e-4)  # by hand: 1 / (1 + 1.96² / 5)
    low, high = interval(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_margins_of_known_odds_get_their_temperature_back() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(0, 2, 4000)
    y = torch.from_numpy((rng.random(4000) < 1 / (1 + np.exp(-odds))).astype(np.int64))
    logits = torch.from_numpy(np.stack([np.zeros(4000), odds], 1) / 4).float()
    assert temperature(logits, y) == pytest.approx(0.25, rel=0.15)


def test_a_representation_that_is_no_extractor_s_is_refused(runs: dict[str, Path]) -> None:
    base = fedloom.load(runs["repper"]).representation()
    base.represent = lambda x: 2 * type(base).represent(base, x)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="repper represents images by more than model.extractor"):
        adapt(base, torch.zeros(2, 1, 8, 8, dtype=torch.uint8), np.array([0, 1]), ("a", "b"))
