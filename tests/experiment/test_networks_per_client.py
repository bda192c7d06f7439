"""Clients with different networks: who gets which, equal numbers on every engine, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.federation import Federation
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.engines import EngineSettings, Lanes, make_engine
from fedloom.models import Factory, build
from fedloom.models.per_client import by_client, dealt
from tests.tiny import same_state, tiny_experiment, tiny_run, tiny_run_with_memory, tiny_task, without_times

NETWORKS = (
    Factory("mlp"),
    Factory("mlp", {"hidden": 16, "norm": True}),
    Factory("mlp", {"features": 9, "project": 64}),
)


def mixed_task(*networks: Factory) -> Task:
    task = tiny_task()
    return replace(task, network=dealt(networks or NETWORKS, task.clients))


def setup_of(task: Task, method: str = "fedproto") -> Setup:
    return Setup(task, fedloom.Recipe().with_(method=method).make_method(), Training(), seed=0)


def test_networks_are_dealt_in_turn():
    assert dealt(NETWORKS, 5).numbers == (0, 1, 2, 0, 1)


def test_networks_by_name_and_number_of_the_client():
    samples = tiny_task().federation
    federation = Federation(samples.train, samples.test, names=("a", "b", "c", "d", "e", "f"))
    small, large = NETWORKS[1], NETWORKS[0]
    found = by_client({"b": small, "3": small, "others": large}, federation)
    assert [found.kinds[found.kind_of(client)] for client in range(6)] == [large, small, large, small, large, large]


def test_a_number_that_is_a_name_stands_for_the_client_of_that_name():
    samples = tiny_task().federation
    small, large = NETWORKS[1], NETWORKS[0]
    federation = Federation(samples.train[:3], samples.test[:3], names=("1", "2", "3"))
    found = by_client({"1": small, "others": large}, federation)
    assert [found.kinds[found.kind_of(client)] for client in range(3)] == [small, large, large]
    with pytest.raises(UserError, match="has no network for 2, 3"):
        by_client({"1": small}, federation)


@pytest.mark.parametrize(("networks", "words"), [
    ({"a": "mlp"}, "has no network for b"),
    ({"x": "mlp", "others": "mlp"}, "model.by_client.x: there is no such client"),
])  # fmt: skip
def test_networks_by_client_must_fit_the_clients(networks, words):
    samples = tiny_task().federation
    federation = Federation(samples.train[:2], samples.test[:2], names=("a", "b"))
    with pytest.raises(UserError, match=words):
        by_client({client: Factory(name) for client, name in networks.items()}, federation)


@pytest.mark.parametrize("method", [
    "fedproto", "fedgh", pytest.param("local", marks=pytest.mark.slow), pytest.param("fedtgp", marks=pytest.mark.slow),
    pytest.param("lgfedavg", marks=pytest.mark.slow), pytest.param("fedproto+linear", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["processes", "replay"])
def test_engines_agree_bit_for_bit(method, engine, tmp_path):
    task = mixed_task()
    one, kept = tiny_run_with_memory(method, task=task, out=str(tmp_path / "inline"))
    other, same = tiny_run_with_memory(method, task=task, engine=engine, out=str(tmp_path / engine))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
    assert kept.keys() == same.keys()
    assert all(same_state(kept[client], same[client]) for client in kept)


def test_a_client_trains_as_if_all_clients_had_its_network(tmp_path):
    _, kept = tiny_run_with_memory("local", task=mixed_task(), out=str(tmp_path / "mixed"))
    for kind, network in enumerate(NETWORKS):
        _, alike = tiny_run_with_memory("local", task=mixed_task(network), out=str(tmp_path / str(kind)))
        of_kind = [client for client in kept if client % 3 == kind]
        assert of_kind
        assert all(same_state(kept[client], alike[client]) for client in of_kind)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = tiny_run("fedgh", task=mixed_task(), out=str(tmp_path / "whole"))
    tiny_run("fedgh", task=mixed_task(), out=str(tmp_path / "part"), training__rounds=2)
    rest = tiny_experiment("fedgh", task=mixed_task(), out=str(tmp_path / "part"))
    rest.run(resume=True, extend=True)
    assert without_times(rest.history) == without_times(whole.history)
    assert same_state(rest.server.state, whole.server.state)


def test_shared_parts_start_from_the_servers_values():
    workspace = Workspace(setup_of(mixed_task(), "fedgh"))
    first, second = workspace.initial, workspace.variants[1].initial
    assert torch.equal(first["model.head.weight"], second["model.head.weight"])
    assert first["model.extractor.fc1.weight"].shape != second["model.extractor.fc1.weight"].shape


def test_messages_have_the_same_tensors_whatever_the_network():
    workspace = Workspace(setup_of(mixed_task()))
    start = Message(workspace.downward())
    sent = [perform(workspace, Job("update", 1, start, client=client)).message for client in range(3)]
    assert sent[0].signature == sent[1].signature == sent[2].signature


def test_personal_models_predict_with_their_own_network(tmp_path):
    experiment = tiny_run("fedproto", task=mixed_task(), out=str(tmp_path / "run"))
    run = fedloom.load(tmp_path / "run", task=experiment.task)
    sizes = [run.personal(client).parts.model.extractor for client in range(3)]
    assert [len(extractor.state_dict()) for extractor in sizes] == [4, 9, 6]
    client = experiment.scores[1].client
    test = experiment.task.federation.test[client]
    logits = run.personal(client)(experiment.task.dataset.inputs[test])
    right = int((logits.argmax(1) == experiment.task.dataset.labels[test]).sum())
    assert right == sum(experiment.scores[1].right)
    path = tmp_path / "client.safetensors"
    run.personal(1).save(path)
    images = experiment.task.dataset.inputs[:5]
    assert torch.equal(fedloom.load_model(path)(images), run.personal(1)(images))
    for model in (run.global_model, run.averaged, run.representation):
        with pytest.raises(UserError, match="its clients have different networks"):
            model()


def test_the_ledger_lists_what_stays_of_each_network(tmp_path):
    experiment = tiny_run("fedproto", task=mixed_task(), out=str(tmp_path / "run"))
    stays = [row["bytes"] for row in experiment.ledger.to_json()["never"] if row["part"] == "model"]
    tensors = [build(f.name, shape=(1, 8, 8), classes=4, **f.options).state_dict() for f in NETWORKS]
    assert stays == [sum(t.numel() * t.element_size() for t in state.values()) for state in tensors]


@pytest.mark.parametrize(("method", "words"), [
    ("fedavg", r"fedavg shares 'model.extractor.fc1.weight', a part of the extractor.*\(fedgh, fedproto, fedtgp"),
    ("ditto", "shares 'model.extractor"), ("fedrep", "shares 'model.extractor"), ("fedbn", "shares 'model.extractor"),
    ("centralized", "different networks"),
])  # fmt: skip
def test_methods_that_share_the_extractor_are_refused(method, words):
    with pytest.raises(UserError, match=words):
        tiny_experiment(method, task=mixed_task())


def test_prototypes_of_different_widths_are_refused():
    task = mixed_task(Factory("mlp"), Factory("mlp", {"features": 9}))
    with pytest.raises(
        UserError, match=r"'means', .* \[4, 64\] with mlp and shape \[4, 9\] with mlp \(features 9\);.*project"
    ):
        tiny_experiment("fedproto", task=task)
    tiny_experiment("local", task=task)


def test_distances_between_tensors_of_different_shapes_are_refused():
    with pytest.raises(UserError, match="evaluation.distance = 'model.extractor': .*fc1.weight"):
        tiny_experiment("fedproto", task=mixed_task(), evaluation__distance="model.extractor")
    tiny_experiment("fedproto", task=mixed_task(), evaluation__distance="model.head")


def test_lanes_refuse_different_networks_and_auto_avoids_them(monkeypatch):
    setup = setup_of(mixed_task())
    with pytest.raises(UserError, match="engine.name = 'lanes': .*different networks.*inline"):
        Lanes(setup, EngineSettings(name="lanes"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with make_engine(setup, EngineSettings(device="cpu")) as engine:
        assert engine.name == "inline"
    with pytest.raises(UserError, match="engine.worker_gpus"):
        make_engine(setup, EngineSettings(name="ray", worker_gpus=1))


def test_a_recipe_names_the_networks(tmp_path):
    recipe = fedloom.Recipe.parse({
        "method": "fedproto", "data": {"name": "digits", "clients": 3},
        "model": ["mlp", {"name": "mlp", "hidden": 16}], "training": {"rounds": 1}, "out": str(tmp_path / "run"),
    })  # fmt: skip
    experiment = fedloom.Experiment(recipe)
    assert experiment.task.network.numbers == (0, 1, 0)
    assert fedloom.Recipe.parse(recipe.resolved()).model.each == recipe.model.each
    summary = experiment.run()
    assert "model: networks of the clients: 2 × mlp, 1 × mlp (hidden 16)" in summary["notes"]
    assert Path(tmp_path / "run" / "models" / "initial-00001.safetensors").exists()


def test_project_gives_a_representation_of_another_width():
    model = build("mlp", shape=(1, 8, 8), classes=4, project=7)
    x = torch.zeros(2, 1, 8, 8)
    assert model.extractor(x).shape == (2, 7)
    assert (model.features, model(x).shape) == (7, (2, 4))
    assert model.taps == ("extractor.network.relu1", "extractor.network.relu2")
