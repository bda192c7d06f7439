"""Newcomers, adapt, predict, export: what somebody does with a finished run, through the command line and in Python."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner, Result

import fedloom
from fedloom import UserError, cli, methods, objectives
from fedloom.adapting import HEADS, adapt, pick_shots, stratified_folds, temperature, wilson
from fedloom.evaluation.newcomers import _in_channels
from fedloom.exporting import describe, export
from fedloom.image_model import ImageFormat
from fedloom.models import models
from fedloom.trained_model import TrainedModel, blank_lane

DIGITS = load_digits()
PIXELS = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs on digits, with two newcomers each."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"data": "digits", "clients": 8, "partition": "dirichlet:1", "model": "mlp", "rounds": 3, "lr": 0.1}
    more = {"data.limit": 900, "data.newcomers": 2, "data.normalise": "channels", "data.views": ["crop:1"]}
    for method in ("fedavg", "fedper", "repper", "lgfedavg"):
        fedloom.run(method=method, out=folder / method, **common, **more)
    return {path.name: path for path in folder.iterdir()}


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code
    return result


def last_line(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def write_pictures(folder: Path, counts: dict[int, int], start: int = 0, size: int = 8) -> Path:
    """Digits as picture files, in a folder for each class."""
    for digit, count in counts.items():
        (folder / f"digit {digit}").mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(DIGITS.target == digit)[start : start + count]:
            picture = Image.fromarray(PIXELS[number]).resize((size, size), Image.Resampling.NEAREST)
            picture.save(folder / f"digit {digit}" / f"{number}.png")
    return folder


# A run's folder


def test_a_run_tells_of_itself_and_its_data(runs: dict[str, Path]) -> None:
    run = fedloom.load(runs["fedavg"])
    assert run.recipe.method.name == "fedavg"
    assert run.summary is not None
    assert len(run.history) == run.summary["rounds"] == 3
    assert run.form.classes == tuple("0123456789")
    assert len(run.task.federation.newcomers) == 2
    mean = run.task.dataset.images[~run.task.dataset.test].double().div(255).mean()
    assert run.form.mean == pytest.approx([float(mean)], abs=0.02)  # measured, not one half


def test_images_may_come_in_any_layout(runs: dict[str, Path]) -> None:
    model = fedloom.load(runs["fedavg"]).personal(3)
    images = PIXELS[:5]
    expected = model(images[:, :, :, None])
    network = fedloom.load(runs["fedavg"]).personal(3).parts.model
    form = model.form
    by_hand = network(torch.from_numpy((images[:, None] / 255 - form.mean[0]) / form.std[0]).float())
    torch.testing.assert_close(expected, by_hand)
    for other in (images, images[:, None], torch.from_numpy(images), images[:, None] / 255):
        torch.testing.assert_close(model(other), expected)
    torch.testing.assert_close(model(images[2]), expected[2:3])
    torch.testing.assert_close(model.features(images), network.extractor(model.prepared(images)))


@pytest.mark.parametrize(
    ("images", "problem"),
    [(np.zeros((2, 9, 9, 1), np.uint8), r"shape \[2, 9, 9, 1\]: .* \[B, 8, 8, 1\]"), (np.zeros((2, 8, 8)) > 1, "bool")],
)
def test_images_that_do_not_fit_are_refused(runs: dict[str, Path], images: np.ndarray, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        fedloom.load(runs["fedavg"]).global_model()(images)


def test_models_that_are_not_there_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="clients 0 to 7"):
        fedloom.load(runs["fedavg"]).personal(8)
    with pytest.raises(UserError, match="no classifier for everybody.*--client 3"):
        fedloom.load(runs["repper"]).global_model()(PIXELS[:1])
    with pytest.raises(UserError, match="shares no representation"):
        fedloom.load(runs["lgfedavg"]).global_model()
    with pytest.raises(UserError, match="holds no run"):
        fedloom.load(tmp_path)
    fedloom.run(
        method="local", data="digits", clients=2, rounds=1, out=tmp_path / "bare",
        **{"storage.personal_models": False, "data.limit": 100},
    )  # fmt: skip
    with pytest.raises(UserError, match="storage.personal_models was off"):
        fedloom.load(tmp_path / "bare").personal(0)
    (tmp_path / "bare" / "summary.json").unlink()
    with pytest.raises(UserError, match="not finished; go on with: fedloom resume"):
        fedloom.load(tmp_path / "bare").personal(0)


def test_the_average_of_personal_models_is_their_weighted_mean(runs: dict[str, Path]) -> None:
    run = fedloom.load(runs["lgfedavg"])
    rows = [row for row in run.clients if not row["newcomer"]]
    weights = [run.personal(row["client"]).parts.model.extractor.fc1.weight for row in rows]
    mean = np.average([w.double().numpy() for w in weights], axis=0, weights=[row["train"] for row in rows])
    np.testing.assert_allclose(run.averaged().parts.model.extractor.fc1.weight.numpy(), mean, atol=1e-6)


# Newcomers


def test_newcomers_of_the_run_are_tested_in_every_way(runs: dict[str, Path]) -> None:
    told = last_line(invoke("newcomers", runs["fedavg"], "--alone-epochs", 1, "--json"))
    run = fedloom.load(runs["fedavg"])
    rows = {row["client"]: row for row in run.clients}
    assert [row["client"] for row in told["clients"]] == list(run.task.federation.newcomers)
    for row in told["clients"]:  # the global model as it is: what the run itself said
        assert row["global"] == pytest.approx(rows[row["client"]]["accuracy"])
    for way in (*HEADS, "alone", "global"):
        assert told["ways"][way]["mean"] == pytest.approx(np.mean([row[way] for row in told["clients"]]))
    assert told["ways"]["logreg"]["mean"] > max(told["ways"]["alone"]["mean"], told["ways"]["global"]["mean"])


def test_newcomers_may_come_from_another_dataset_with_other_classes(runs: dict[str, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colours = np.array([[250, 10, 10], [10, 10, 250], [240, 240, 240]])
    y = rng.integers(0, 3, 120)
    x = np.clip(colours[y][:, None, None] + rng.normal(0, 20, (120, 12, 12, 3)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "colours.npz", x=x, y=y)
    flags = ("--data", tmp_path / "colours.npz", "--clients", 3, "--partition", "iid", "--heads", "linear,svm")
    told = last_line(invoke("newcomers", runs["repper"], *flags, "--alone-epochs", 0, "--json"))
    assert told["ways"].keys() == {"linear", "svm"}  # no global classifier knows these classes
    assert told["representation"] == "shared"
    assert told["newcomers"] == 3
    assert told["ways"]["svm"]["mean"] > 0.9
    told = invoke("newcomers", runs["lgfedavg"], *flags, "--alone-epochs", 1)
    assert "average of the clients' extractors" in told.stderr
    assert "linear head" in told.stdout


def test_newcomers_that_are_not_there_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    fedloom.run(method="fedavg", data="digits", clients=2, rounds=1, out=tmp_path / "all", **{"data.limit": 100})
    with pytest.raises(UserError, match="data.newcomers = 0.*--data"):
        invoke("newcomers", tmp_path / "all")
    with pytest.raises(UserError, match="--heads svn: did you mean 'svm'"):
        invoke("newcomers", runs["fedavg"], "--heads", "svn")


def test_colours_become_grey_as_pillow_does_it() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    grey = _in_channels(torch.from_numpy(colour).permute(2, 0, 1)[None], 1)
    np.testing.assert_array_equal(grey[0, 0].numpy(), np.asarray(Image.fromarray(colour).convert("L")))


# Adapt


@pytest.mark.parametrize("head", HEADS)
def test_a_folder_of_pictures_becomes_a_model(runs: dict[str, Path], tmp_path: Path, head: str) -> None:
    folder = write_pictures(tmp_path / "mine", {3: 12, 5: 12, 8: 12}, size=20)
    said = last_line(invoke("adapt", runs["repper"], "--images", folder, "--head", head, "--json"))
    assert said["classes"] == {"digit 3": 12, "digit 5": 12, "digit 8": 12}
    assert (said["how"], said["tested"], said["warnings"]) == ("5-fold", 36, [])
    assert said["low"] < said["accuracy"] < said["high"]
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
    told = " ".join(said["warnings"])
    assert "one image of 'digit 4', 'digit 7'" in told
    assert "no better than always answering 'digit 2' (85%)" in told
    assert "torn.png (cannot identify image file)" in told


@pytest.mark.parametrize(
    ("inside", "problem"),
    [("photo.png", "a folder for each class.*'photo.png' is there"), ("notes.txt", "there are no pictures in it")],
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
    _, told = adapt(base, images, rng.permutation(np.arange(40) % 2), ("a", "b"), head="mlp")
    assert told.accuracy is not None and told.low is not None
    assert told.low < 0.5


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
    assert wilson(5, 5) == pytest.approx((0.5655, 1), abs=1e-4)  # by hand: 1 / (1 + 1.96² / 5)
    low, high = wilson(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_margins_of_known_odds_get_their_temperature_back() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(0, 2, 4000)
    y = torch.from_numpy((rng.random(4000) < 1 / (1 + np.exp(-odds))).astype(np.int64))
    logits = torch.from_numpy(np.stack([np.zeros(4000), odds], 1) / 4).float()
    assert temperature(logits, y) == pytest.approx(0.25, rel=0.15)


# Predict


def test_predictions_as_table_csv_and_json(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = write_pictures(tmp_path / "some", {6: 3, 9: 2}, start=100)
    (folder / "notes.txt").write_text("no picture")
    files = sorted(str(path) for path in folder.rglob("*.png"))
    model = fedloom.load(runs["fedper"]).personal(2)
    expected = model.probabilities(np.stack([np.asarray(Image.open(file)) for file in files]))
    said = last_line(invoke("predict", runs["fedper"], folder, "--client", 2, "--json"))
    assert [row["file"] for row in said["predictions"]] == files
    for row, likely in zip(said["predictions"], expected, strict=True):
        assert row["class"] == str(likely.argmax())
        assert row["probability"] == pytest.approx(likely.max())
        assert list(row["probabilities"].values()) == pytest.approx(likely.tolist())
    table = invoke("predict", runs["fedper"], *files[:2], "--client", 2).stdout
    assert table.count("│") == 2 * 4
    rows = list(csv.DictReader(io.StringIO(invoke("predict", runs["fedper"], folder, "--client", 2, "--csv").stdout)))
    assert [(row["file"], row["class"]) for row in rows] == [(r["file"], r["class"]) for r in said["predictions"]]
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected.max(1).tolist(), abs=1e-6)


def test_pictures_that_cannot_be_read_are_named_and_told_by_the_exit_code(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_pictures(tmp_path / "some", {6: 2})
    (folder / "torn.png").write_bytes(next(folder.rglob("*.png")).read_bytes()[:60])
    result = invoke("predict", runs["fedavg"], folder, "--json", code=3)
    said = last_line(result)
    assert len(said["predictions"]) == 2
    assert [row["file"] for row in said["skipped"]] == [str(folder / "torn.png")]
    assert "torn.png" in result.stderr
    result = invoke("predict", runs["fedavg"], folder / "torn.png", "--csv", code=3)
    assert result.stdout == "file,class,probability\n"


def test_what_cannot_be_predicted_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        invoke("predict", runs["fedavg"], tmp_path / "nothing.png")
    with pytest.raises(UserError, match="no classifier for everybody"):
        invoke("predict", runs["repper"], tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot be read as a model"):
        invoke("predict", tmp_path / "x.safetensors", tmp_path)
    with pytest.raises(UserError, match="no model of fedloom"):
        invoke("predict", runs["fedavg"] / "models" / "server.safetensors", tmp_path)


# Export


def trained_network(name: str) -> TrainedModel:
    """A network with statistics that are not those of a fresh one."""
    side = {"cnn2": 16, "cnn3": 22}.get(name, 12)
    form = ImageFormat(("cat", "dog", "owl"), (3, side, side), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    torch.manual_seed(0)
    model = TrainedModel(blank_lane(methods.get("fedavg"), objectives.get("labels"), form, {"name": name}), form, 0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def images_for(model: TrainedModel, batch: int) -> np.ndarray:
    channels, height, width = model.form.shape
    return np.random.default_rng(1).integers(0, 256, (batch, height, width, channels), dtype=np.uint8)


def onnx_logits(path: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", list(images.shape[1:]))
    return np.asarray(session.run(None, {"images": images})[0])


@pytest.mark.parametrize("name", sorted(set(models()) - {"resnet34"}))  # 34 is 18 with more of the same blocks
def test_every_network_gives_the_same_logits_in_onnxruntime(name: str, tmp_path: Path) -> None:
    model = trained_network(name)
    assert export(model, "onnx", tmp_path / "m.onnx") < 1e-4
    for batch in (1, 7):
        images = images_for(model, batch)
        expected = model(images).numpy()
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(onnx_logits(tmp_path / "m.onnx", images), expected, atol=1e-4)
    kept = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(kept["classes"]) == ["cat", "dog", "owl"]
    assert kept == describe(model)


@pytest.mark.parametrize("name", ["cnn3", "resnet20"])
def test_torchscript_and_safetensors_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model, images = trained_network(name), images_for(trained_network(name), 4)
    export(model, "torchscript", tmp_path / "m.pt")
    extra = {"fedloom.json": ""}
    script = torch.jit.load(str(tmp_path / "m.pt"), _extra_files=extra)
    torch.testing.assert_close(script(torch.from_numpy(images)), model(images))
    assert json.loads(json.loads(extra["fedloom.json"])["classes"]) == ["cat", "dog", "owl"]
    export(model, "safetensors", tmp_path / "m.safetensors")
    assert torch.equal(fedloom.load_model(tmp_path / "m.safetensors")(images), model(images))


@pytest.mark.parametrize("method", ["fedproto", "fedstyle", "apfl", "scaffold", "fedamp", "fedavg+svm"])
def test_methods_with_models_of_their_own_kind_are_exported(method: str, tmp_path: Path) -> None:
    short = {"fedstyle": {"style_epochs": 1, "head_epochs": 1, "head_steps": 1}}.get(method, {})
    fedloom.run(
        method={"name": method, **short}, data="digits", clients=3, rounds=1, out=tmp_path / "run",
        **{"data.limit": 200, "data.views": ["crop:1"]},
    )  # fmt: skip
    model = fedloom.load(tmp_path / "run").personal(1)
    expected = model(PIXELS[:6]).numpy()
    said = last_line(invoke("export", tmp_path / "run", "--client", 1, "--to", "onnx", "--json"))
    assert (said["file"], said["classes"]) == ("client-1.onnx", list("0123456789"))
    np.testing.assert_allclose(
        onnx_logits(Path("client-1.onnx"), PIXELS[:6, :, :, None]), expected, rtol=1e-4, atol=1e-4
    )
    invoke("export", tmp_path / "run", "--client", 1, "--to", "safetensors", "--out", "one.safetensors")
    alone = fedloom.load_model("one.safetensors")
    np.testing.assert_array_equal(alone(PIXELS[:6]).numpy(), expected)
    torch.testing.assert_close(alone.features(PIXELS[:6]), model.features(PIXELS[:6]))
    assert not any("control" in name or "previous" in name for name in alone.needed())


def test_an_adapted_model_is_exported_too(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", {3: 10, 5: 10})
    invoke("adapt", runs["repper"], "--images", folder, "--head", "mlp", "--to", "here")
    invoke("export", "here/model.safetensors", "--to", "onnx", "--out", "m.onnx")
    expected = fedloom.load_model("here/model.safetensors")(PIXELS[:3]).numpy()
    np.testing.assert_allclose(onnx_logits(Path("m.onnx"), PIXELS[:3, :, :, None]), expected, atol=1e-4)


def test_an_export_that_would_lie_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_network("mlp")
    monkeypatch.setattr("fedloom.exporting.load_model", lambda path: lambda images: model(images) + 0.01)
    with pytest.raises(UserError, match="differ from the model's by 0.01; it was removed"):
        export(model, "safetensors", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_what_cannot_be_exported_is_refused(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--to onx: did you mean 'onnx'"):
        invoke("export", runs["fedavg"], "--to", "onx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs onnx and onnxruntime: pip install 'fedloom\[export\]'"):
        invoke("export", runs["fedavg"], "--to", "onnx")
