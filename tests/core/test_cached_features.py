"""Features of a frozen extractor are computed once where they can be, and results stay what recomputation gives."""

from dataclasses import replace

import pytest
import torch
from cohorts import LaneEngine, alternately, same_run
from tiny import same_state, tiny_experiment, tiny_run_with_memory, tiny_task
from torch import nn

import fedloom
from fedloom.core.batches import origin_of
from fedloom.core.features import LookUp
from fedloom.core.workspace import Workspace
from fedloom.models import MODELS

torch.set_num_threads(1)
METHODS = ["fedavg", "ditto", "fedcrl", "fedrep", "repper", "fedproto"]


class Counting(nn.Module):
    """A layer that counts the samples that pass it."""

    samples = 0

    def forward(self, x):
        Counting.samples += len(x)
        return x


class Net(nn.Module):
    def __init__(self, num_classes: int, norm: str = ""):
        super().__init__()
        self.count = Counting()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8, track_running_stats=False) if norm == "batch" else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(self.count(x))).relu().mean((2, 3))))


@pytest.fixture(autouse=True)
def _net():
    MODELS["features-net"] = Net
    Counting.samples = 0


def frozen(name="mlp", augment=(), **options):
    return tiny_task(name, augment=augment, freeze=("extractor",), **options)


def run(method, task, cached=True, **fields):
    """A finished experiment, and what clients kept."""
    kept = {}

    def note(record):
        states = {client: experiment.memory.get(client) for client in range(task.clients)}
        kept.update({client: dict(state) for client, state in states.items() if state})

    experiment = tiny_experiment(method, task=task, on_round=note, **fields)
    experiment.setup = replace(experiment.setup, cache_features=cached)
    experiment.run()
    return experiment, kept


def remarks(experiment):
    return [note for note in experiment._notes if "features of the frozen extractor" in note]


@pytest.mark.parametrize("method", alternately(METHODS, 0))
def test_engines_agree_with_each_other_and_with_recomputation(method):
    task = frozen(norm=True)
    inline, memory = run(method, task)
    assert remarks(inline) == [
        "model.freeze: features of the frozen extractor are computed once for 240 samples (0.1 MB); training and "
        "evaluation reuse them"
    ]
    for engine in ("processes", "replay"):
        experiment, kept = run(method, task, engine=engine)
        assert same_state(experiment.server.state, inline.server.state)
        assert kept.keys() == memory.keys() and all(same_state(kept[client], memory[client]) for client in kept)
    same_run((inline, memory), run(method, task, cached=False))  # within rounding: batches have other sizes


def test_each_sample_passes_the_extractor_once():
    task = frozen("features-net")
    Counting.samples = 0
    experiment, _ = run("fedavg", task, training__epochs=4)
    passed = Counting.samples
    assert experiment.history[-1]["global_accuracy"] is not None
    # all samples, one of them twice as a check; networks are tried with 2 samples when they are built
    assert len(task.dataset.labels) + 1 <= passed < len(task.dataset.labels) + 100
    Counting.samples = 0
    run("fedavg", task, cached=False, training__epochs=4)
    assert Counting.samples > 4 * len(task.dataset.labels)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedcrl", marks=pytest.mark.slow)])
def test_vectorised_clients_look_features_up(method):
    assert LaneEngine.name
    task = frozen("features-net")
    same_run(run(method, task, engine="lane-for-tests", workers=3), run(method, task))


def test_augmented_inputs_are_recomputed_and_the_run_says_so():
    task = frozen(augment=("crop:1", "noise:0.05"))
    got, expected = run("fedavg", task), run("fedavg", task, cached=False)
    assert same_state(got[0].server.state, expected[0].server.state)
    assert remarks(got[0]) == [
        "model.freeze: features of the frozen extractor are recomputed in every step, because data.augment changes the "
        "images"
    ]
    assert Workspace(got[0].setup).features == []


@pytest.mark.parametrize("method", ["fedintr", "fedcka"])
def test_layers_inside_of_a_frozen_extractor_are_computed(method):
    task = frozen()
    got, expected = run(method, task), run(method, task, cached=False)
    assert Workspace(got[0].setup).features
    assert same_state(got[0].server.state, expected[0].server.state)  # bit for bit: nothing is looked up in training


def test_views_are_computed():
    task = replace(frozen(), views=tiny_task().views)
    got, expected = (run("fedavg", task, cached, objective="simclr") for cached in (True, False))
    assert same_state(got[0].server.state, expected[0].server.state)
    assert got[0].history[-1]["personal_accuracy"] == pytest.approx(
        expected[0].history[-1]["personal_accuracy"], abs=0.02
    )
    assert remarks(got[0])[0].endswith("except for views, whose features are recomputed in every step")


def test_features_that_depend_on_the_batch_are_not_cached():
    got, _ = run("fedavg", frozen("features-net", norm="batch"))
    assert remarks(got) == [
        "model.freeze: features of the frozen extractor are recomputed in every step, because those of a sample depend "
        "on the other samples in its batch"
    ]


def test_only_unchanged_inputs_of_the_same_data_are_looked_up():
    setup = replace(tiny_experiment("fedavg", task=frozen()).setup, cache_features=True)
    workspace, other = Workspace(setup), Workspace(setup)
    workspace.modes.evaluate_only()
    extractor, (features,) = workspace.parts.model.extractor, workspace.features
    assert isinstance(extractor.forward, LookUp) and isinstance(workspace.received.model.extractor.forward, LookUp)
    index = torch.tensor([3, 1])
    x = workspace.stored.plain(index)
    assert torch.equal(extractor(x), features[index])
    features[3] += 1  # so that a look-up and a computation differ
    looked_up, computed = extractor(x), extractor(x + 0)
    assert not torch.allclose(looked_up, computed)
    assert torch.equal(extractor(other.stored.plain(index)), computed)
    hook = extractor.fc1.register_forward_hook(lambda *_: None)
    assert torch.equal(extractor(x), computed)
    hook.remove()
    assert torch.equal(extractor(x), looked_up)
    extractor.fc1.train()
    assert torch.equal(extractor(x), computed)
    extractor.eval()
    x.mul_(1)
    assert origin_of(x, workspace.stored) is None
    assert torch.equal(extractor(x), computed)


def test_equal_extractors_have_one_tensor_of_features():
    setup = replace(tiny_experiment("ditto", task=frozen()).setup, cache_features=True)
    workspace = Workspace(setup)
    assert len(workspace.features) == 1 and Workspace(setup).features[0] is workspace.features[0]
    assert isinstance(workspace.parts.personal.extractor.forward, LookUp)


def test_a_part_of_the_extractor_is_not_enough():
    experiment, _ = run("fedavg", tiny_task("mlp", augment=(), freeze=("extractor.fc1",)))
    assert not remarks(experiment) and not Workspace(experiment.setup).features


def test_a_resumed_run_and_its_models(tmp_path):
    model = {"name": "mlp", "freeze": ["extractor"]}
    fields = {"data": "digits", "clients": 2, "partition": "iid", "data.limit": 200, "model": model, "method": "ditto"}
    fedloom.run(out=tmp_path / "long", rounds=3, **fields)
    fedloom.run(out=tmp_path / "short", rounds=1, **fields)
    fedloom.resume(tmp_path / "short", rounds=3)
    runs = [fedloom.load(tmp_path / name) for name in ("long", "short")]
    assert same_state(*[run.personal(1).workspace.tensors for run in runs])
    task = runs[0].task
    images = task.dataset.inputs[torch.from_numpy(task.federation.test[1])]
    right = (runs[0].personal(1)(images).argmax(1) == task.dataset.labels[task.federation.test[1]]).float().mean()
    assert float(right) == pytest.approx(runs[0].client_rows[1]["accuracy"])


def test_kept_states_have_no_features():
    _, memory = tiny_run_with_memory("fedproto", task=frozen())
    assert {name for state in memory.values() for name in state} == {"model.head.weight", "model.head.bias"}
