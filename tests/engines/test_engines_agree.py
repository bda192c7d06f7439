"""Every registered method gives the same numbers on every engine, bit for bit."""

from dataclasses import replace

import pytest
import torch
from cohorts import alternately
from references import figures, reference
from tiny import same_state, tiny_dataset, tiny_run, tiny_task, without_times

from fedloom.core.errors import UserError
from fedloom.methods import METHODS as REGISTRY

METHODS = [*sorted(REGISTRY), "fedavg+ft"]
# Every method on one of the engines, and on both in `make slow`; the number of workers alternates.
PAIRS = [
    pytest.param(method, engine, (1, 3)[i // 2 % 2], marks=[pytest.mark.slow] * (i % 2 != j))
    for i, method in enumerate(METHODS)
    for j, engine in enumerate(("processes", "replay"))
]


@pytest.mark.parametrize(("method", "engine", "workers"), PAIRS)
def test_an_engine_equals_inline_bit_for_bit(method, engine, workers):
    expected, got = reference(method), tiny_run(method, engine=engine, workers=workers)
    assert same_state(got.server.state, expected.state)
    assert without_times(got.history) == without_times(expected.history)
    assert figures(got.scores) == figures(expected.scores)


@pytest.mark.parametrize("method", alternately([name for name in METHODS if name != "untrained"], 0))  # it has no loss
def test_a_rerun_is_the_same_and_another_seed_is_not(method):
    expected = reference(method).history[0]["loss"]
    assert tiny_run(method, training__rounds=1).history[0]["loss"] == expected
    assert tiny_run(method, training__rounds=1, seed=4).history[0]["loss"] != expected


def test_dropout_and_adam_replay_bit_for_bit():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    adam = {"training__optimizer__name": "adam", "training__optimizer__momentum": 0.0}
    expected, got = tiny_run("fedprox", task=task, **adam), tiny_run("fedprox", engine="replay", task=task, **adam)
    assert same_state(got.server.state, expected.server.state)
    assert all(torch.isfinite(v).all() for v in got.server.state.values())


OPTIMIZERS = [
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "decay_norms": False, "clip": 1.0},
    {"name": "rmsprop", "lr": 0.001, "momentum": 0.5, "clip": 1.0},
    {"name": "adagrad", "lr": 0.02, "weight_decay": 0.01},
    {"name": "lion", "lr": 0.003, "weight_decay": 0.1, "decay_norms": False},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["name"])
@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_optimizer_is_the_same_on_every_engine(optimizer, keep):
    fields = {"training__optimizer": optimizer | {"keep": keep}, "training__warmup": 2}
    expected = tiny_run("ditto", **fields)
    assert all(0 < record["loss"] < 2 for record in expected.history)
    for engine in ("processes", "replay"):
        got = tiny_run("ditto", engine=engine, **fields)
        assert same_state(got.server.state, expected.server.state)
        assert without_times(got.history) == without_times(expected.history)


def test_channels_last_is_another_layout_of_the_same_numbers():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    last = {"engine__channels_last": True, "task": task}
    plain, here = tiny_run("fedcrl", task=task), tiny_run("fedcrl", **last)
    there, recorded = tiny_run("fedcrl", engine="processes", **last), tiny_run("fedcrl", engine="replay", **last)
    for name, value in plain.server.state.items():
        torch.testing.assert_close(here.server.state[name], value, rtol=1e-3, atol=1e-4)
    assert same_state(there.server.state, here.server.state)
    assert same_state(recorded.server.state, here.server.state)


def test_a_cpu_refuses_what_only_gpus_have():
    with pytest.raises(UserError, match="engine.precision = 'bf16': needs a GPU"):
        tiny_run("fedavg", engine__precision="bf16")
