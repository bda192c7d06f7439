import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import same_state, tiny_experiment, tiny_run, tiny_task
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.models import build, split_model
from fedloom.models.weights import load_weights

torch.set_num_threads(1)
SHAPE = (1, 8, 8)


def mlp(classes=4, seed=1):
    torch.manual_seed(seed)
    return build("mlp", shape=SHAPE, classes=classes, norm=True)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model.", "parts.model."])
def test_tensors_are_found_by_name_after_a_common_prefix(tmp_path, kind, prefix):
    source, file = mlp(), tmp_path / f"net.{kind}"
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    save_file(state, file) if kind == "safetensors" else torch.save(state, file)
    target = mlp(seed=2)
    assert load_weights(target, str(file)) == f"model.weights = '{file}': loaded 11 of 11 tensors"
    assert same_state(target.state_dict(), source.state_dict())


def test_a_head_of_other_classes_is_skipped_and_named(tmp_path):
    source, target = mlp(classes=7), mlp(seed=2)
    random_head = target.head.weight.clone()
    state = dict(source.state_dict()) | {"extra.weight": torch.zeros(2)}
    del state["extractor.fc2.bias"], state["extractor.bn1.num_batches_tracked"]
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "net.pth")
    assert load_weights(target, str(tmp_path / "net.pth")).split("; ") == [
        f"model.weights = '{tmp_path / 'net.pth'}': loaded 7 of 11 tensors",
        "skipped because of their shapes: head.weight (7×64 in the file, 4×64 here), head.bias (7 in the file, 4 here)",
        "not in the file: extractor.fc2.bias",
        "not in the network: extra.weight",
    ]
    assert target.extractor.fc1.weight.equal(source.extractor.fc1.weight)
    assert target.head.weight.equal(random_head)


def test_a_plain_network_reads_the_names_that_it_had_before_it_was_split(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4))
    split = split_model(other, shape=SHAPE)
    load_weights(split, str(tmp_path / "net.pt"))
    x = torch.rand(3, *SHAPE)
    assert split(x).equal(net(x))


def test_resnets_read_torchvisions_names(tmp_path):
    torch.manual_seed(0)
    model = build("resnet18", shape=(3, 64, 64), classes=10)
    names = {model.published_name(name) for name in model.state_dict()}
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer4.1.bn2.bias"} <= names
    assert {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.running_mean", "fc.weight", "fc.bias"} <= names
    state = {model.published_name(name): torch.rand(t.shape) for name, t in model.state_dict().items() if t.dim()}
    torch.save(state, tmp_path / "resnet18.pth")
    assert "loaded 102 of 122 tensors" in load_weights(model, str(tmp_path / "resnet18.pth"))  # 20 are counts
    assert model.extractor.stage2[0].shortcut[0].weight.equal(state["layer2.0.downsample.0.weight"])


class Danger:
    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


def write(path, content):
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)


def compressed():
    buffer, out = io.BytesIO(), io.BytesIO()
    torch.save({"head.weight": torch.zeros(4, 64)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("none.pt", None, "there is no such file; give a state dict"),
        ("danger.pt", {"head.weight": Danger()}, "cannot be read as a state dict"),
        ("danger.pkl", pickle.dumps(Danger()), "is neither safetensors nor a file of torch.save since torch 1.6"),
        ("empty.pt", b"", "is neither safetensors nor a file of torch.save"),
        ("cut.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "cannot be read as safetensors"),
        ("packed.pt", compressed(), "has compressed entries"),
        ("list.pt", [1, 2], "is not a state dict: it contains a list without tensors"),
        ("other.pt", {"a.b": torch.zeros(2)}, "none of its tensors' names fits the network.*the file has a.b"),
        ("shapes.pt", {"head.bias": torch.zeros(2)}, "none of its tensors' shapes fits the network"),
        ("nan.pt", {"head.bias": torch.full((4,), torch.nan)}, "head.bias contains NaN or infinite values"),
        ("int.pt", {"head.bias": torch.zeros(4, dtype=torch.int64)}, "dtype torch.int64, but torch.float32"),
        ("sparse.pt", {"head.bias": torch.zeros(4).to_sparse()}, "head.bias is a sparse"),
    ],
)
def test_files_that_cannot_be_used_are_refused_and_execute_nothing(tmp_path, monkeypatch, name, content, wanted):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path / name, content)
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=wanted):
        load_weights(model, name)
    assert same_state(model.state_dict(), before)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "ditto"])
def test_every_engine_starts_from_the_file(tmp_path, method):
    source, file = mlp(), str(tmp_path / "net.safetensors")
    save_file(source.state_dict(), file)
    task = tiny_task("mlp", norm=True, weights=file)
    parts = tiny_run(method, task=task, training__epochs=0, training__rounds=1)
    started = {name.removeprefix("model."): value for name, value in parts.server.state.items()}
    assert same_state({name: started[name] for name in source.state_dict()}, source.state_dict())
    runs = [tiny_run(method, task=task, engine=engine).server.state for engine in ("inline", "processes", "replay")]
    assert all(same_state(run, runs[0]) for run in runs)
    assert not same_state(runs[0], tiny_run(method).server.state)


def test_a_run_says_what_was_loaded_and_its_models_do_not_need_the_file(tmp_path):
    digits = build("mlp", shape=SHAPE, classes=3)
    save_file(digits.state_dict(), tmp_path / "net.safetensors")
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 1, "out": tmp_path / "run"}
    model = {"name": "mlp", "weights": str(tmp_path / "net.safetensors")}
    summary = fedloom.run(model=model, **fields)
    assert any("loaded 4 of 6 tensors; skipped because of their shapes: head.weight" in n for n in summary["notes"])
    (tmp_path / "net.safetensors").unlink()
    trained = fedloom.load(tmp_path / "run").global_model()
    trained.save(tmp_path / "model.safetensors")
    images = torch.zeros(2, 8, 8, 1, dtype=torch.uint8)
    assert fedloom.load_model(tmp_path / "model.safetensors")(images).equal(trained(images))


def test_a_trained_model_is_a_file_of_weights(tmp_path):
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 1}
    fedloom.run(out=tmp_path / "run", **fields)
    fedloom.load(tmp_path / "run").global_model().save(tmp_path / "model.safetensors")
    model = {"name": "mlp", "weights": str(tmp_path / "model.safetensors")}
    again = fedloom.run(model=model, out=tmp_path / "again", **{**fields, "epochs": 0})
    assert again["global_accuracy"] == fedloom.load(tmp_path / "run").summary["global_accuracy"]


def test_a_resumed_run_warns_if_its_file_has_changed(tmp_path, caplog):
    file = tmp_path / "net.safetensors"
    save_file(mlp().state_dict(), file)
    task, out = tiny_task("mlp", norm=True, weights=str(file)), str(tmp_path / "run")

    def stop(record):
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        tiny_experiment("fedavg", task=task, on_round=stop, out=out, storage__checkpoint_every=1).run()
    save_file(mlp(seed=9).state_dict(), file)
    tiny_experiment("fedavg", task=task, out=out, storage__checkpoint_every=1).run(resume=True)
    assert f"the version of {file} is sha256 " in caplog.text
