import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import same_state, tiny_run, tiny_run_with_memory, tiny_task
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.flat_state import nbytes
from fedloom.core.state import under
from fedloom.methods import METHODS as METHOD_CLASSES
from fedloom.models import build

torch.set_num_threads(1)
METHODS = ["fedavg", "fedrep", "ditto", "fedcrl"]


def frozen_task(*names, **options):
    return tiny_task("mlp", norm=True, freeze=names, **options)


def initial(experiment):
    return experiment.setup.build().named_tensors()


@pytest.mark.parametrize(
    "names", [("extractor",), pytest.param(("extractor.fc1", "extractor.bn1"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", METHODS)
def test_frozen_parts_keep_their_values_and_stay_where_they_are(method, names):
    task = frozen_task(*names)
    fixed = [f"{part}.{name}" for part in ("model", "personal") for name in names]
    free, _ = tiny_run_with_memory(method)
    runs = {
        engine: tiny_run_with_memory(method, task=task, engine=engine) for engine in ("inline", "processes", "replay")
    }
    inline, memory = runs["inline"]
    start = initial(inline)

    # nothing frozen is sent or kept, and the bytes that are sent drop by the size of the frozen parts
    def sent(experiment):
        return {n: t for n, t in start.items() if under(n, experiment.method.up) and n != "counts"}

    gone = nbytes({name: t for name, t in sent(free).items() if under(name, fixed)})
    assert gone > 0
    for key in ("up_bytes", "down_bytes"):
        assert [free.history[i][key] - inline.history[i][key] for i in range(3)] == [gone] * 3
    assert not any(under(name, fixed) for name in inline.server.state)
    assert not any(under(name, fixed) for state in memory.values() for name in state)

    # frozen tensors are bit-identical in every client's personal model and everything else is trained
    folder = fedloom.load(inline.folder.path, task=task)
    trained = False
    for client in range(task.clients):
        tensors = folder.personal(client).workspace.tensors
        assert all(tensors[name].equal(start[name]) for name in tensors if under(name, fixed))
        trained = trained or any(not tensors[name].equal(start[name]) for name in tensors if not under(name, fixed))
    assert trained

    # engines agree
    for experiment, kept in runs.values():
        assert same_state(experiment.server.state, inline.server.state)
        assert kept.keys() == memory.keys()
        assert all(same_state(kept[client], memory[client]) for client in kept)


def test_a_frozen_batch_norm_is_in_eval_mode_and_a_frozen_fit_takes_no_steps():
    experiment = tiny_run("fedrep", task=frozen_task("extractor"))
    start = initial(experiment)
    assert start["model.extractor.bn1.running_mean"].equal(torch.zeros(128))
    assert experiment.server.state == {}
    assert all(record["up_bytes"] == record["down_bytes"] == 0 for record in experiment.history)
    assert all(record["loss"] is not None for record in experiment.history)  # of the heads


def test_training_the_head_alone_is_training_a_linear_model_on_fixed_features():
    task = tiny_task("mlp", augment=(), freeze=("extractor",), hidden=16)
    fields = {"training__rounds": 1, "training__fraction": 1.0, "training__epochs": 2, "training__batch_size": 1000}
    experiment = tiny_run("fedavg", task=task, **fields)
    model = experiment.setup.build().model
    optimizer = experiment.recipe.training.optimizer
    states = []
    for samples in task.federation.train:
        z = model.extractor(task.stored.plain(torch.from_numpy(samples))).detach()
        weight, bias = model.head.weight.detach().clone(), model.head.bias.detach().clone()
        velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
        for _ in range(2):
            error = (z @ weight.T + bias).softmax(1)
            error[torch.arange(len(z)), task.dataset.labels[samples]] -= 1
            for parameter, v, g in zip((weight, bias), velocity, (error.T @ z, error.sum(0)), strict=True):
                v.mul_(optimizer.momentum).add_(g / len(z))
                parameter.sub_(optimizer.lr * v)
        states.append((len(samples), weight, bias))
    total = sum(size for size, _, _ in states)
    weight = sum(size * w for size, w, _ in states) / total
    torch.testing.assert_close(experiment.server.state["model.head.weight"], weight)
    assert set(experiment.server.state) == {"model.head.weight", "model.head.bias"}


def test_the_run_and_its_ledger_say_what_is_frozen(tmp_path):
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 1}
    model = {"name": "mlp", "freeze": "extractor"}
    summary = fedloom.run(model=model, out=tmp_path / "run", **fields)
    size = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    assert any(f"model.extractor: 4 tensors ({size:,} bytes) stay fixed" in note for note in summary["notes"])
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    row = next(row for row in ledger["never"] if row["part"] == "model.extractor")
    assert (row["tensors"], row["bytes"], row["why"]) == (4, size, "frozen: the initial values, everywhere")
    assert {t["name"] for entry in ledger["messages"] for t in entry["tensors"]} == {
        "model.head.weight", "model.head.bias"
    }  # fmt: skip


def test_pretrained_frozen_weights_are_in_the_models_of_the_run(tmp_path):
    torch.manual_seed(5)
    source = build("mlp", shape=(1, 8, 8), classes=3)
    save_file(source.state_dict(), tmp_path / "net.safetensors")
    model = {"name": "mlp", "freeze": ["extractor"], "weights": str(tmp_path / "net.safetensors")}
    fields = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 2, "epochs": 2}
    fedloom.run(model=model, out=tmp_path / "run", **fields)
    (tmp_path / "net.safetensors").unlink()
    run = fedloom.load(tmp_path / "run")
    for trained in (run.global_model(), run.personal(1), run.representation()):
        trained.save(tmp_path / "model.safetensors")
        loaded = fedloom.load_model(tmp_path / "model.safetensors")
        assert loaded.parts.model.extractor.fc2.weight.equal(source.extractor.fc2.weight)
        assert trained.parts.model.extractor.fc1.weight.equal(source.extractor.fc1.weight)
    assert run.representation().client == -1


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["extracter"], "model.freeze = 'extracter': the network has no such part: did you mean 'extractor'"),
        (["extractor", "head"], "nothing of the network is left to train; freeze less"),
    ],
)
def test_names_that_cannot_be_frozen_are_refused(names, wanted):
    with pytest.raises(UserError, match=wanted):
        build("mlp", shape=(1, 8, 8), classes=4, freeze=names)


def test_layers_without_gradients_are_frozen_like_those_that_the_recipe_names():
    x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    fields = {"data": (x, y), "clients": 3, "partition": "iid", "rounds": 2, "method": "fedavg"}
    named = fedloom.run(model=deepcopy(net), **fields, **{"model.freeze": ["extractor.0"]})
    net[0].requires_grad_(False)
    run = fedloom.run(model=net, **fields)
    assert run["up_bytes"] == named["up_bytes"] == 4 * (6 * 7 + 3 * 7)
    assert run.summary["notes"] == named.summary["notes"] and "stay fixed" in run.summary["notes"][0]
    assert torch.equal(run.global_model()(x), named.global_model()(x))
    adapted = fedloom.run(model=net, **fields, **{"model.lora": 2})
    assert adapted["up_bytes"] == 4 * (2 * (5 + 6) + 2 * (6 + 6) + 3 * 7)
    net[0].bias.requires_grad_(True)
    with pytest.raises(UserError, match="'weight' of 'extractor.0' has requires_grad = False, but others"):
        fedloom.run(model=net, **fields)


def test_a_method_that_shares_an_extractor_without_parameters_says_that_clients_learn_alone():
    x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    fields = {"data": (x, y), "model": nn.Linear(5, 3), "clients": 3, "partition": "iid", "rounds": 2}
    assert fedloom.run(**fields, method="fedavg")["up_bytes"] == 4 * 3 * 6
    notes = fedloom.run(**fields, method="fedper").summary["notes"]
    assert notes == ["fedper has nothing to send (nothing to train in model.extractor), so clients learn alone"]
    assert not fedloom.run(**fields, method="local").summary["notes"]


@pytest.mark.parametrize("kind", ["freeze", "lora"])
@pytest.mark.parametrize("method", [name if name == "fedcrl" else pytest.param(name, marks=pytest.mark.slow)
                                    for name in sorted(METHOD_CLASSES)])  # fmt: skip
def test_no_method_writes_to_frozen_tensors_which_all_clients_share(method, kind):
    options = {"freeze": ("extractor",)} if kind == "freeze" else {"lora": {"rank": 2}}
    experiment = tiny_run(method, task=tiny_task("mlp", augment=(), norm=True, **options))
    (frozen,), start = experiment.setup.frozen_tensors.values(), initial(experiment)
    assert frozen and all(tensor.equal(start[name]) for name, tensor in frozen.items())
