"""Methods and data that are passed as Python objects."""

import json
import os
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.rng import Random
from fedloom.data import from_arrays
from fedloom.data.augment import parse_augment
from fedloom.methods.fedavg import FedAvg
from fedloom.models import MODELS
from fedloom.runs.object_names import described, name_of
from fedloom.runs.registration import register_model
from fedloom.trust.ledger_file import read_ledger

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 5)) * [1, 10, 100, 1, 1] + [0, 5, 50, 0, 0]
Y = (X[:, 0] + X[:, 1] / 10 - X[:, 2] / 100 > 0).astype(int)
SETTING = {"clients": 3, "partition": "iid", "rounds": 3, "lr": 0.1}


@pytest.fixture
def near():
    class Near(FedAvg):
        """FedAvg with a number."""

        pull: float = 0.1

    return Near


def test_a_method_is_a_class_or_an_instance(near):
    by_class = fedloom.run(data=(X, Y), method=near, out="class", **SETTING)
    assert by_class["method"] == "near"
    fedloom.run(data=(X, Y), method=near(pull=0.7), out="instance", **SETTING)
    assert fedloom.load("instance").recipe.method.options == {"pull": 0.7}
    assert json.loads(Path("class/versions.json").read_text())["method near"].startswith("sha256 ")
    runs = fedloom.compare(data=(X, Y), methods=[near, "fedavg"], **SETTING | {"rounds": 1})
    assert [run["method"] for run in runs] == ["near", "fedavg"]
    assert runs[0]["personal_accuracy"] == runs[1]["personal_accuracy"]
    with_source = ["method near" in json.loads((Path(run["run_dir"]) / "versions.json").read_text()) for run in runs]
    assert with_source == [True, False]  # the class is not part of the other method's run


def test_objects_may_stand_in_sections_and_in_the_values_of_a_sweep(near):
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    recipe = {
        "data": {"name": (X, Y), "clients": 3, "partition": lambda pool: np.arange(len(pool.labels)) % 3},
        "model": {"name": net, "freeze": ["extractor"]}, "method": {"name": near, "pull": 0.2},
        "training": {"rounds": 1},
    }  # fmt: skip
    run = fedloom.run(recipe, out="run")
    assert run["up_bytes"] == 4 * (2 * 4 + 2) and run["clients"] == 3
    assert run.recipe.method.options == {"pull": 0.2}
    by_path = fedloom.run(**{"data.name": (X, Y), "model.name": net, "method.name": near}, **SETTING)
    assert by_path["method"] == "near" and by_path.recipe.model.name == run.recipe.model.name
    networks = fedloom.sweep(data=(X, Y), over={"model": [net, nn.Linear(5, 2)]}, **SETTING | {"rounds": 1})
    assert [run["up_bytes"] for run in networks] == [4 * (4 * 6 + 2 * 5), 4 * 2 * 6]
    with pytest.raises(UserError, match="sweep.over.optimizer: an optimizer of torch.optim has its own learning rate"):
        fedloom.sweep(data=(X, Y), over={"optimizer": [torch.optim.NAdam]}, **SETTING)
    with pytest.raises(UserError, match=r"objective = \(array\(\[\[.* must be a name") as refused:
        fedloom.run(data=(X, Y), objective=(X, Y), **SETTING)
    assert "\n" not in str(refused.value)


def test_inputs_are_standardised_by_the_clients_sums_and_the_ledger_says_so():
    fedloom.run(data=(X, Y), method="fedavg", out="run", **SETTING)
    run = fedloom.load("run")
    with pytest.raises(UserError, match="passed as a Python object, .* pass the same object again"):
        fedloom.data.sources.load("object-unknown")
    train = np.concatenate(run.task.federation.train)
    assert run.form.dtype == "float32"
    np.testing.assert_allclose(run.form.mean, X[train].astype(np.float32).mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run.form.std, X[train].astype(np.float32).std(0), rtol=1e-4)
    assert any("data.normalise: federated" in line for line in read_ledger(run.folder)["numbers"])
    model = run.personal(0)
    assert tuple(model(X[:7]).shape) == (7, 2)
    assert torch.equal(model(X[0]), model(X[:1]))
    with pytest.raises(UserError, match=r"inputs of shape \[7, 4\]: this model takes \[B, 5\]"):
        model(X[:7, :4])
    with pytest.raises(UserError, match="not image files"):
        model.form.image_shape  # noqa: B018


def test_a_network_that_was_an_object_is_needed_again_to_resume_a_run():
    net = nn.Sequential(nn.Flatten(), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    fedloom.run(data=(X, Y), model=net, out="run", **SETTING | {"rounds": 1})
    name = fedloom.load("run").recipe.model.name
    assert name in MODELS and name not in MODELS.names()  # not offered for names that are unknown
    del MODELS[name]
    wanted = f"model.name = '{name}': it was passed as a Python object, .* fedloom.resume.RUN, model=…"
    with pytest.raises(UserError, match=wanted):
        fedloom.resume("run", rounds=2)
    assert fedloom.resume("run", rounds=2, model=net)["rounds"] == 2


class Scaled:
    """A descent whose scale is any value."""

    moments = 0

    def __init__(self, scale):
        self.scale = scale

    def direction(self, gradient, moments, count):
        return gradient * float(self.scale)


def factory(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=float(lr))


@pytest.mark.parametrize("kind", [np.float32, torch.tensor, np.asarray])
@pytest.mark.parametrize("make", [Scaled, factory, lambda value: partial(Scaled(1).direction, count=value)])
def test_optimizers_that_differ_in_a_value_have_different_names(kind, make):
    names = [
        name_of(type(thing) if isinstance(thing, Scaled) else thing, sha256(str(described("", values)).encode()))
        for thing in (make(kind(0.0)), make(kind(0.5)), make(kind(0.5)))
        for values in [vars(thing) if isinstance(thing, Scaled) else {}]
    ]
    assert names[0] != names[1] == names[2]


def test_a_sweep_over_optimizers_runs_each_of_them_and_a_run_needs_its_own_again():
    given = [Scaled(np.float32(0)), Scaled(np.float32(0.9))]
    runs = fedloom.sweep(data=(X, Y), over={"optimizer": given}, **SETTING | {"rounds": 1})
    assert len(runs) == 2 and runs[0]["personal_accuracy"] != runs[1]["personal_accuracy"]
    folder = runs[0]["run_dir"]
    data = {"data": (X, Y)}
    assert fedloom.load(folder, optimizer=Scaled(np.float32(0)), **data)
    with pytest.raises(
        UserError, match="optimizer: it is 'object-Scaled-.*', but the run in .* has training.optimizer"
    ):
        fedloom.load(folder, optimizer=given[1], **data)


def test_a_value_that_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="optimizer: Scaled: the value 'scale', a lock, cannot be compared"):
        fedloom.run(data=(X, Y), optimizer=Scaled(Lock()), **SETTING)


def test_networks_that_differ_in_a_layer_without_weights_have_different_names():
    layer = nn.Linear(5, 2)
    names = [register_model(nn.Sequential(layer, last)) for last in (nn.ReLU(), nn.Tanh(), nn.ELU(1), nn.ELU(2))]
    assert len(set(names)) == 4


@pytest.mark.slow
def test_the_name_of_an_object_is_the_same_in_every_process(tmp_path):
    script = tmp_path / "names.py"
    script.write_text(
        "import numpy, torch\nfrom torch import nn\nfrom fedloom.runs.registration import register_optimizer\n"
        "def make(values):\n    return lambda parameters: torch.optim.SGD(parameters, lr=0.1)\n"
        "for value in ({'a', 'b', 'c'}, {1: torch.ones(2)}, numpy.random.default_rng(0), nn.Identity(), make, torch):\n"
        "    print(register_optimizer((lambda value: lambda p: value and torch.optim.SGD(p, lr=0.1))(value))[0])\n"
    )
    found = [
        subprocess.run(
            [sys.executable, str(script)], env=os.environ | {"PYTHONHASHSEED": seed}, text=True, capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1] and len(set(found[0].split())) == 6


@pytest.mark.parametrize(("normalise", "mean", "std"), [("none", 0, 1), ("half", 0.5, 0.5)])
def test_other_normalisations(normalise, mean, std):
    fedloom.run(data=(X, Y), out="run", **SETTING | {"rounds": 1}, **{"data.normalise": normalise})
    form = fedloom.load("run").form
    assert set(form.mean) == {mean} and set(form.std) == {std}


@pytest.mark.parametrize("method", ["fedavg", "repper", "fedcrl"])
def test_engines_agree_on_inputs_of_any_shape(method):
    signals = from_arrays(RNG.normal(size=(120, 2, 16)), Y[:120], name="signals")
    histories = []
    for engine in ("inline", "processes", "replay"):
        fedloom.run(data=signals, method=method, engine=engine, out=engine, **SETTING | {"rounds": 2})
        histories.append([(r["loss"], r["personal_accuracy"]) for r in fedloom.load(engine).round_records])
    assert histories[0] == histories[1] == histories[2]


def test_clients_keep_their_division():
    summary = fedloom.run(data={"north": (X[:100], Y[:100]), "south": (X[100:], Y[100:])}, rounds=1, out="run")
    assert summary["clients"] == 2
    federation = fedloom.load("run").task.federation
    assert [len(a) + len(b) for a, b in zip(federation.train, federation.test, strict=True)] == [100, 140]


def test_a_division_by_the_recipe_replaces_that_of_the_data():
    data = {"north": (X[:100], Y[:100]), "south": (X[100:], Y[100:])}
    run = fedloom.run({"data": {"partition": "iid", "clients": 4}}, data=data, rounds=1, out="run")
    assert (run["clients"], run.recipe.data.partition) == (4, "iid")
    assert fedloom.resume("run", data=data, rounds=2)["rounds"] == 2
    runs = fedloom.compare(data=data, methods=["local", "fedavg"], rounds=1)
    assert [run["clients"] for run in runs] == [2, 2]
    assert fedloom.sweep(data=data, over={"lr": [0.1]}, rounds=1)[0]["clients"] == 2


def test_test_samples_of_the_data_are_not_trained_on():
    parts = {"train": (X[:200], Y[:200]), "test": (X[200:], Y[200:])}
    alone = fedloom.run(data=parts, clients=4, partition="iid", rounds=1, out="alone").task.federation
    assert sorted(np.concatenate(alone.train)) == list(range(200))
    assert sorted(np.concatenate(alone.test)) == list(range(200, 240))
    clients = {"north": parts, "south": {"train": (X, Y), "test": (X[:9], Y[:9])}}
    run = fedloom.run(data=clients, rounds=1, out="clients")
    assert [len(test) for test in run.task.federation.test] == [40, 9]
    assert run.summary["notes"] == [note for note in run.summary["notes"] if "natural" not in note]
    mixed = fedloom.run(data=parts, clients=4, partition="iid", rounds=1, **{"data.split": "pooled:0.5"})
    assert len(np.concatenate(mixed.task.federation.train)) == 120


def test_a_stopped_run_needs_the_same_data_again():
    fedloom.run(data=(X, Y), out="run", **SETTING)
    with pytest.raises(UserError, match=r"data\.name"):
        fedloom.resume("run", data=(X + 1, Y))
    assert fedloom.resume("run", data=(X, Y))["rounds"] == 3


def test_networks_and_augmentations_of_images_are_refused_for_tables():
    with pytest.raises(UserError, match=r"model 'cnn2': needs images .* shape of a sample is \(5,\); choose mlp"):
        fedloom.run(data=(X, Y), model="cnn2", **SETTING)
    with pytest.raises(UserError, match=r"data\.augment = 'crop:4': needs images, .* use gaussian, mask, shift"):
        fedloom.run(data=(X, Y), **SETTING, **{"data.augment": ["crop:4"]})


def test_augmentations_of_any_shape():
    x = torch.arange(1.0, 1 + 4 * 2 * 1000).reshape(4, 2, 1000)
    draws = Random.seeded(0, "augment")
    masked = parse_augment(["mask:0.25"])(x, draws)
    assert ((masked == 0) | (masked == x)).all()
    assert (masked == 0).double().mean() == pytest.approx(0.25, abs=0.02)
    noisy = parse_augment(["gaussian:2"])(x, draws) - x
    assert (noisy.mean().item(), noisy.std().item()) == pytest.approx((0, 2), abs=0.1)
    shifted = parse_augment(["shift:0.1"])(x, draws)
    for before, after in zip(x, shifted, strict=True):
        by = int((after[0, 0] - before[0, 0]).item()) % 1000
        assert min(by, 1000 - by) <= 100
        assert torch.equal(after, before.roll(-by, -1))


class Net(nn.Module):
    """A plain network for tables, with dropout."""

    def __init__(self, num_classes: int = 2, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(0.1))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))


def test_a_network_is_a_module_a_class_or_a_function():
    module = Net()
    fedloom.run(data=(X, Y), model=module, out="module", **SETTING | {"rounds": 1, "epochs": 0})
    stored = fedloom.load("module").global_model()
    x = torch.from_numpy(X[:4]).float()
    assert torch.allclose(stored(x), module.eval()(stored.prepared(x)), atol=1e-6)
    fedloom.run(data=(X, Y), model=Net, out="class", **SETTING, **{"model.width": 16})
    assert fedloom.load("class").global_model().features(x).shape == (4, 16)
    fedloom.run(data=(X, Y), model=lambda num_classes: Net(num_classes, 3), method="fedrep", out="made", **SETTING)
    assert fedloom.load("made").personal(0).features(x).shape == (4, 3)
