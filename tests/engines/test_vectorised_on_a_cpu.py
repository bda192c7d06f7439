"""Clients that are vectorised on a CPU (`engine.cohort`) end where they end one after another."""

import warnings
from dataclasses import replace

import pytest
import torch
from cohorts import alternately, close, same_run, updates
from references import reference
from test_workers_fail import engine_of, jobs
from tiny import same_state, tiny_experiment, tiny_run, tiny_run_with_memory, tiny_task
from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.optimizers import TORCH_OPTIMIZERS
from fedloom.core.setup import Setup
from fedloom.core.state import copy_
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.engines import EngineSettings, Inline, make_engine
from fedloom.engines.base import COHORT, MANY_STEPS
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.models import MODELS, Factory
from fedloom.models.per_client import dealt


@pytest.mark.parametrize("cohort", [2, 6])
@pytest.mark.parametrize("method", alternately(["fedavg", "fedrep", "scaffold"], 0))
def test_inline_ends_where_clients_end_alone(method, cohort):
    task = tiny_task(norm=False)
    got = tiny_run_with_memory(method, task=task, engine__cohort=cohort)
    same_run(got, tiny_run_with_memory(method, task=task))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_get_their_share_of_a_round(workers):
    task, everyone = tiny_task(norm=False), {"training__fraction": 1.0}
    got = tiny_run_with_memory("fedper", task=task, engine="processes", workers=workers, engine__cohort=4, **everyone)
    same_run(got, tiny_run_with_memory("fedper", task=task, **everyone))
    # 6 clients: 4 and 2 with one worker, 3 and 3 with two
    with engine_of(get("fedavg"), workers=workers, cohort=4) as engine:
        assert engine.batch == (4, 3)[workers - 1]


def test_a_resumed_run_is_bit_identical(tmp_path):
    whole = tiny_run("fedavg", engine__cohort=4)
    tiny_run("fedavg", engine__cohort=4, training__rounds=2, out=str(tmp_path / "run"))
    rest = tiny_experiment("fedavg", engine__cohort=4, out=str(tmp_path / "run"))
    rest.run(resume=True, extend=True)
    assert same_state(rest.server.state, whole.server.state)


_TORCH = "object:SGD"


class _Raising(FedAvg, abstract=True):
    def update(self, client):
        super().update(client)
        if client.id == 1:
            raise ValueError("no")


def test_an_error_of_one_client_is_its_own():
    with engine_of(_Raising(), workers=1, cohort=3) as engine:
        results = list(engine.run(jobs(engine, [0, 1, 2])))
    assert [result.error is None for result in results] == [True, False, True]


class _OutOfBounds(FedAvg, abstract=True):
    """Client 2 has a class that a table has no entry for: a step fails because of its data."""

    def build(self, task):
        return super().build(task) | {"table": torch.ones(5), "number": torch.zeros((), dtype=torch.int64)}

    def update(self, client):
        copy_(client.number, torch.tensor(7 if client.id == 2 else 1))
        super().update(client)

    def loss(self, client, batch):
        return super().loss(client, batch) * client.table.index_select(0, client.number.view(1)).sum()


def test_an_error_in_a_shared_step_is_its_clients_own():
    setup = Setup(tiny_task(norm=False), _OutOfBounds(), Training(), seed=0)
    with Inline(setup, EngineSettings(name="inline", cohort=3)) as engine:
        with pytest.warns(UserWarning, match="4 clients run one by one, because a training step failed: .*index 7 is"):
            results = list(engine.run(updates(setup, [0, 1, 2, 3])))
        assert [result.error is None for result in results] == [True, True, False, True]
        assert "index out of range" in results[2].error.why
        close(results[3].message, perform(Workspace(setup), updates(setup, [3])[0]).message)
        assert [result.error for result in engine.run(updates(setup, [0, 1, 3]))] == [None] * 3


def test_injected_crashes_leave_out_the_same_clients():
    with engine_of(_Raising(), workers=1, cohort=3, faults={"crash": 0.5}) as engine:
        vectorised = [r.error.kind if r.error else None for r in engine.run(jobs(engine, [0, 2, 3, 4]))]
    with engine_of(_Raising(), workers=1, faults={"crash": 0.5}) as engine:
        alone = [r.error.kind if r.error else None for r in engine.run(jobs(engine, [0, 2, 3, 4]))]
    assert vectorised == alone
    assert "died" in alone


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": "replay"}, "'replay' trains one client at a time; set engine.name to one of: inline, lanes"),
        ({"engine__deterministic": True}, "engine.deterministic trains one client at a time"),
        ({"engine": "processes", "engine__client_timeout": 9}, "engine.client_timeout cannot stop one of several"),
        (
            {"task": replace(tiny_task(), network=dealt((Factory("mlp"), Factory("mlp", {"hidden": 16})), 6))},
            "different networks",
        ),
        ({"training__optimizer": {"name": _TORCH}}, "a torch.optim optimizer cannot be vectorised"),
        ({"training__optimizer": {"name": _TORCH}, "engine": "processes"}, "remove engine.cohort"),
    ],
)
def test_what_cannot_be_combined_is_refused(fields, words, monkeypatch):
    monkeypatch.setitem(TORCH_OPTIMIZERS, _TORCH, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(UserError, match=f"engine.cohort = 4.*{words}"):
        tiny_run("local", engine__cohort=4, **fields)


class _Reading(FedAvg, abstract=True):
    """Reads a value on the host, so its steps can be neither recorded nor vectorised."""

    def loss(self, client, batch):
        value = super().loss(client, batch)
        return value * (1 if value.item() < 100 else 2)


def test_a_step_that_cannot_be_recorded_runs_eagerly_with_a_warning():
    setup = Setup(tiny_task(norm=False), _Reading(), Training(), seed=0)
    with (
        Inline(setup, EngineSettings(name="inline", cohort=3)) as engine,
        pytest.warns(UserWarning, match="a training step cannot be recorded and runs eagerly"),
    ):
        results = list(engine.run(updates(setup, [0, 1, 2, 3])))
    for result, job in zip(results, updates(setup, [0, 1, 2, 3]), strict=True):
        close(result.message, perform(Workspace(setup), job).message)


def _twelve(task, small=0):
    """The task with every client twice, and the two small ones some more times."""
    train, test = (clients * 2 + clients[4:] * small for clients in (task.federation.train, task.federation.test))
    return replace(task, federation=Federation(train, test))


@pytest.mark.parametrize(
    ("fields", "hinted"),
    [
        ({}, True),
        ({"engine": "processes", "workers": 1}, True),
        ({"engine": "processes", "workers": 2}, False),  # six clients of a round per worker
        ({"engine": "processes", "workers": 1, "engine__client_timeout": 60}, False),
        ({"training__fraction": 0.5}, False),
        ({"method": "centralized"}, False),
        ({"training__optimizer": {"name": _TORCH}}, False),
        ({"engine__cohort": 2}, False),
        ({"engine__cohort": 1}, False),
        ({"training__batch_size": 64}, False),
        ({"task": _twelve(tiny_task("cnn4", width=4))}, False),
        ({"task": _twelve(tiny_task(), small=5)}, False),  # sizes differ much
    ],
)
def test_small_networks_in_long_runs_have_a_hint(monkeypatch, fields, hinted):
    monkeypatch.setitem(TORCH_OPTIMIZERS, _TORCH, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    fields = {"task": _twelve(tiny_task()), "method": "fedavg", "training__fraction": 1.0} | fields
    for rounds in (MANY_STEPS, 1):
        experiment = tiny_experiment(training__rounds=rounds, **fields)
        with make_engine(experiment.setup, experiment.recipe.engine) as engine:
            assert (COHORT in engine.hints()) is (hinted and rounds > 1)


def test_there_is_memory_for_at_most_the_clients_of_a_round():
    setup = Setup(tiny_task(norm=False), FedAvg(), Training(fraction=0.5), seed=0)
    with Inline(setup, EngineSettings(name="inline", cohort=1024)) as engine:
        assert engine._cohort.slots == 3
    setup = Setup(tiny_task(norm=False), FedAvg(), Training(fraction=0.1), seed=0)
    with Inline(setup, EngineSettings(name="inline", cohort=1024)) as engine:
        assert engine._cohort is None
    with engine_of(FedAvg(), workers=2, cohort=1024) as engine:
        assert engine._inner.cohort == 3


class _Sequences(nn.Module):
    """Rows of an image as a sequence, for layers whose fused operations cannot be vectorised."""

    def __init__(self, classes):
        super().__init__()
        self.recurrent = nn.LSTM(8, 12, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        z, _ = self.recurrent(x[:, 0])
        return self.head(self.attention(z, z, z, need_weights=False)[0].mean(1))


def test_recurrent_layers_and_attention_are_vectorised(capfd, monkeypatch):
    monkeypatch.setitem(MODELS, "sequences-for-tests", _Sequences)
    task = replace(tiny_task(), network=Factory("sequences-for-tests", {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tiny_run_with_memory("fedper", task=task, engine__cohort=4)
    assert "performance drop" not in capfd.readouterr().err
    assert torch.backends.mkldnn.enabled
    same_run(got, tiny_run_with_memory("fedper", task=task))


def test_steps_are_recorded_one_by_one_and_only_if_several_clients_take_them():
    """A tape holds the results of all its operations, and takes a single client's steps no faster."""
    setup = Setup(tiny_task(norm=False), FedAvg(), Training(batch_size=2), seed=0)
    with Inline(setup, EngineSettings(name="inline", cohort=3)) as engine:
        list(engine.run(updates(setup, [0, 1, 2])))
        recorded = list(engine._cohort._graphs)
    assert recorded
    assert {count for _, count in recorded} == {1}
    assert not any("alone" in kind for kind, _ in recorded)


def test_the_reference_is_not_vectorised():
    assert same_state(tiny_run("fedavg", engine__cohort=1).server.state, reference("fedavg").state)
