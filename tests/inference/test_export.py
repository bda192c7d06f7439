"""Exported files give the model's logits, whatever the network, the method and the format."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from using import PIXELS, invoke, last_line, write_pictures

import fedloom
from fedloom import UserError, methods, objectives
from fedloom.core.input_format import InputFormat
from fedloom.inference.export import describe, export
from fedloom.inference.trained_model import TrainedModel, blank_workspace
from fedloom.models import MODELS, Factory


def trained_network(name: str) -> TrainedModel:
    """A network with statistics that are not those of a fresh one."""
    side = {"cnn2": 16, "cnn3": 22}.get(name, 12)
    form = InputFormat(("cat", "dog", "owl"), (3, side, side), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    torch.manual_seed(0)
    model = TrainedModel(blank_workspace(methods.get("fedavg"), objectives.get("labels"), form, Factory(name)), form, 0)
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


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"resnet34"}))  # 34 is 18 with more of the same blocks
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


@pytest.mark.parametrize("shape", [(6,), (2, 16)])
def test_models_of_tables_and_signals_are_exported(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = 5 + 3 * np.random.default_rng(0).normal(size=(80, *shape)).astype(np.float32)
    y = np.where(x.reshape(80, -1)[:, 0] > 5, "ill", "well")
    model = fedloom.run(data=(x, y), clients=2, rounds=1, model="mlp", out=tmp_path / "run").personal(0)
    expected = model(x[:7]).numpy()
    export(model, "onnx", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("inputs", "tensor(float)", list(shape))
    np.testing.assert_allclose(session.run(None, {"inputs": x[:7]})[0], expected, atol=1e-4)
    export(model, "torchscript", tmp_path / "m.pt")
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "m.pt"))(torch.from_numpy(x[:7])).numpy(), expected)
    export(model, "safetensors", tmp_path / "m.safetensors")
    assert describe(model)["input"] == f"inputs: float32 [batch, {', '.join(map(str, shape))}]"


def test_an_adapted_model_is_exported_too(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mine", {3: 10, 5: 10})
    invoke("adapt", runs["repper"], "--images", folder, "--head", "mlp", "--to", "here")
    invoke("export", "here/model.safetensors", "--to", "onnx", "--out", "m.onnx")
    expected = fedloom.load_model("here/model.safetensors")(PIXELS[:3]).numpy()
    np.testing.assert_allclose(onnx_logits(Path("m.onnx"), PIXELS[:3, :, :, None]), expected, atol=1e-4)


def test_an_export_that_would_lie_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_network("mlp")
    monkeypatch.setattr("fedloom.inference.export.load_model", lambda path: lambda images: model(images) + 0.01)
    with pytest.raises(UserError, match="differ from the model's by 0.01, so it was not written"):
        export(model, "safetensors", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_what_cannot_be_exported_is_refused(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--to onx: did you mean 'onnx'"):
        invoke("export", runs["fedavg"], "--to", "onx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs onnx and onnxruntime: pip install 'fedloom\[export\]'"):
        invoke("export", runs["fedavg"], "--to", "onnx")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="m.pt' cannot be written: .*; choose another place"):
        export(trained_network("mlp"), "torchscript", tmp_path / "file" / "m.pt")


def test_a_head_for_single_clients_survives_the_file(tmp_path: Path) -> None:
    fedloom.run(
        method={"name": "repper", "heads": {1: "mlp"}, "head_steps": 5, "head_epochs": 1}, data="digits", clients=2,
        rounds=1, out=tmp_path / "run", **{"data.limit": 100, "data.views": ["crop:1"]},
    )  # fmt: skip
    for client, kind in enumerate(("linear", "mlp")):
        model = fedloom.load(tmp_path / "run").personal(client)
        model.save(tmp_path / "one.safetensors")
        alone = fedloom.load_model(tmp_path / "one.safetensors")
        assert torch.equal(alone(PIXELS[:4]), model(PIXELS[:4]))
        assert {name.split(".")[2] for name in alone.needed() if "classifier" in name} == {kind}
