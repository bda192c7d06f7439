"""Objects of a script, a notebook or a function: methods, networks, partitions and optimizers on every engine."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.deploy.deployable import deployable
from fedloom.methods.fedavg import FedAvg
from fedloom.models import MODELS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5))
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
SETTING = {"data": (X, Y), "clients": 3, "partition": "iid", "rounds": 2, "lr": 0.1}


def own_objects():
    """Objects that no other process can import."""

    class Half(FedAvg):
        """FedAvg with a smaller loss."""

        share: float = 0.5

        def loss(self, client, batch):
            return self.share * super().loss(client, batch)

    class Sign:
        """Signs of an average of gradients."""

        moments = 1

        def __init__(self, momentum=0.9):
            self.momentum = momentum

        def direction(self, gradient, moments, count):
            return moments[0].mul_(self.momentum).add_(gradient).sign() / count.sqrt().to(gradient.dtype)

    width = 4
    return {
        "method": Half(share=0.7),
        "model": lambda num_classes: nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, num_classes)),
        "optimizer": Sign(0.5),
    }


@pytest.fixture
def objects():
    return own_objects()


def trained(**fields):
    """Run, and return losses and a model's output."""
    run = fedloom.run(**SETTING | fields)
    return [record["loss"] for record in run.round_records], run.global_model()(X[:4])


def agree(one, other):
    assert one[0] == other[0] and torch.equal(one[1], other[1])


def test_forked_workers_inherit_objects_and_recorded_steps_use_them(objects):
    expected = trained(**objects, engine="inline")
    agree(trained(**objects, engine="processes", **{"engine.workers": 2}), expected)
    agree(trained(**objects, engine="replay"), expected)


@pytest.mark.slow
def test_spawned_workers_get_objects_by_value(objects, monkeypatch):
    expected = trained(**objects, engine="inline")
    monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)
    agree(trained(**objects, engine="processes", **{"engine.workers": 1}), expected)


def test_without_cloudpickle_spawned_workers_refuse_objects_in_one_line(objects, monkeypatch):
    monkeypatch.setattr("fedloom.engines.processes.fork_works", lambda: False)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(Exception, match="cannot be pickled .* install cloudpickle") as refused:
        fedloom.run(**SETTING, **objects, engine="processes")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ray_workers_get_objects_by_value(objects):
    expected = trained(**objects, engine="inline")
    agree(trained(**objects, engine="ray", **{"engine.workers": 1}), expected)


def test_deployments_refuse_objects(objects):
    run = fedloom.run(**SETTING | {"rounds": 1}, **objects)
    recipe = run.recipe.with_(**{"data.normalise": "half"})
    for field, name in (("data.name", "digits"), ("model.name", "mlp"), ("training.optimizer.name", "sgd")):
        with pytest.raises(UserError, match=f"{field} = 'object-.* is a Python object of this process"):
            deployable(recipe)
        recipe = recipe.with_(**{field: name})
    with pytest.raises(UserError, match="method.name = 'half': is a Python object of this process"):
        deployable(recipe)
    deployable(Recipe.parse({"method": "fedavg"}))


def halves(labels, clients, rng):
    """Shuffle and cut into equal parts."""
    return np.array_split(rng.permutation(len(labels)), clients)


def by_pool(pool):
    return np.arange(len(pool.labels)) % pool.clients


def by_masks(labels, clients, rng):
    return [np.arange(len(labels)) % clients == client for client in range(clients)]


def test_a_partition_is_a_function():
    run = fedloom.run(**SETTING | {"partition": halves, "rounds": 1}, out="run")
    assert run.recipe.data.partition.startswith("object-halves-")
    division = run.task.federation
    assert [len(a) + len(b) for a, b in zip(division.train, division.test, strict=True)] == [40, 40, 40]
    other = fedloom.run(**SETTING | {"partition": by_pool, "rounds": 1})
    assert sorted([*other.task.federation.train[1], *other.task.federation.test[1]]) == list(range(1, 120, 3))
    masks = fedloom.run(**SETTING | {"partition": by_masks, "rounds": 1}).task.federation
    assert all(np.array_equal(a, b) for a, b in zip(masks.train, other.task.federation.train, strict=True))


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (lambda labels, clients, rng: [np.arange(60)] * clients, "gave a sample to client 1 that was given before"),
        (lambda labels, clients, rng: [np.arange(60)], "returned 1 arrays for 3 clients; set clients=1"),
        (lambda labels, clients, rng: [[500], [1], [2]], "positions of client 0 outside 0 to 119"),
        (lambda labels, clients: [], "lambda has 2 parameters; it must be a function of"),
        (lambda pool: np.zeros(3), "it must return one integer for each of 120 samples"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(partition, words):
    with pytest.raises(UserError, match=words) as refused:
        fedloom.run(**SETTING | {"partition": partition})
    assert "\n" not in str(refused.value)


def test_an_optimizer_of_torch_runs_where_steps_are_not_recorded():
    built_in = trained(optimizer="adam", lr=0.02)
    made = {name: value for name, value in SETTING.items() if name != "lr"}
    runs = [
        fedloom.run(**made, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02), engine=engine)
        for engine in ("inline", "processes")
    ]
    assert runs[0].recipe.training.optimizer.lr == 0.02
    assert runs[0].round_records[-1]["loss"] == runs[1].round_records[-1]["loss"]
    np.testing.assert_allclose([record["loss"] for record in runs[0].round_records], built_in[0], rtol=1e-5)
    torch.testing.assert_close(runs[0].global_model()(X[:4]), built_in[1], rtol=1e-4, atol=1e-5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class NoMoments:
    def direction(self, gradient, moments, count):
        return gradient


class Flat(NoMoments):
    moments = 0

    def direction(self, gradient, moments, count):
        return gradient.sum()


@pytest.mark.parametrize(
    ("optimizer", "more", "words"),
    [
        (sgd, {"engine": "replay"}, "cannot be recorded on this engine, .* use engine='inline' or 'processes'"),
        (sgd, {"training.optimizer.momentum": 0.9}, "training.optimizer.momentum = 0.9: an optim.* sets it itself"),
        (sgd, {"training.optimizer.keep": True}, "training.optimizer.keep = true: the state of a torch.optim"),
        (sgd, {"lr": 0.3}, "lr = 0.3: the optimizer was made with lr = 0.1; leave one of them out"),
        (sgd([nn.Parameter(torch.ones(2))]), {}, "this SGD belongs to the parameters of one network, .* pass a func"),
        (lambda parameters: torch.optim.LBFGS(parameters), {}, "a trial step of lambda failed: .*closure"),
        (lambda parameters: 3, {}, "lambda returned a int; it must return a torch.optim optimizer"),
        (NoMoments(), {}, "NoMoments.moments = None: must be from 0 to 4"),
        (Flat, {}, r"Flat.direction returned \[\] for a gradient of shape \[3, 2\]"),
        (3, {}, "a int cannot be used; give a name, a function of parameters"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused(optimizer, more, words):
    with pytest.raises(UserError, match=words) as refused:
        fedloom.run(**SETTING | {"optimizer": optimizer} | more)
    assert "\n" not in str(refused.value)


def network(width):
    return lambda num_classes: nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, num_classes))


def test_values_that_a_function_refers_to_are_part_of_its_name():
    runs = [fedloom.run(**SETTING | {"rounds": 1}, model=network(width)) for width in (3, 6)]
    assert [run.global_model().features(X[:2]).shape[1] for run in runs] == [3, 6]


SCRIPT = """
import sys
import numpy as np
import torch
from torch import nn
import fedloom

rng = np.random.default_rng(0)
x = rng.normal(size=(90, 5)); y = (x[:, 0] > 0).astype(int)
def halves(labels, clients, rng):
    return np.array_split(rng.permutation(len(labels)), clients)
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
def net(num_classes):
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, num_classes))
given = dict(data=(x, y), partition=halves, optimizer=sgd, model=net)

def refused(call):
    try:
        call()
    except fedloom.UserError as error:
        print("REFUSED", str(error).replace("\\n", " & "))

def stop(record):
    raise KeyboardInterrupt

if sys.argv[1] == "start":
    try:
        fedloom.run(**given, clients=3, rounds=2, out="run", on_round=stop)
    except KeyboardInterrupt:
        pass
else:
    refused(lambda: fedloom.load("run"))
    refused(lambda: fedloom.resume("run", **{name: given[name] for name in ("data", "model", "optimizer")}))
    print("rounds", fedloom.resume("run", **given)["rounds"])
    print("task", fedloom.load("run").task.clients)
"""


@pytest.mark.slow
def test_another_process_needs_the_objects_again():
    Path("script.py").write_text(SCRIPT)
    for part in ("start", "resume"):
        done = subprocess.run([sys.executable, "script.py", part], capture_output=True, text=True, check=True)
    first, second, rounds, task = done.stdout.strip().splitlines()
    assert "is not stored; pass the same object again" in first
    assert "data.partition = 'object-halves-" in second and "fedloom.resume(RUN, partition=…)" in second
    assert (rounds, task) == ("rounds 2", "task 3")


def test_a_loaded_run_takes_a_network_with_other_weights():
    run = fedloom.run(**SETTING | {"rounds": 1}, model=network(4)(2), out="run")
    expected = run.global_model()(X[:3])
    del MODELS[run.recipe.model.name]
    with pytest.raises(UserError, match=r"model.name = 'object-Sequential-.* pass the same object again"):
        fedloom.load("run")
    again = fedloom.load("run", model=network(4)(2))
    assert torch.equal(again.global_model()(X[:3]), expected)
    with pytest.raises(UserError, match="rounds: cannot be given here"):
        fedloom.load("run", rounds=3)
