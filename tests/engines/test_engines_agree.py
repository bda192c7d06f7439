"""Every registered method gives the same numbers on every engine, bit for bit."""

from dataclasses import replace

import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_run, tiny_task, without_times

from fedloom.core.errors import UserError
from fedloom.methods import METHODS as REGISTRY

METHODS = [*sorted(REGISTRY), "fedavg+ft"]


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """One inline run per method, made when first asked for."""
    runs = {}

    def of(method):
        if method not in runs:
            runs[method] = tiny_run(method, out=str(tmp_path_factory.mktemp("inline") / "run"))
        return runs[method]

    return of


def results(experiment):
    return [(s.client, s.right, s.total, s.loss) for s in experiment.scores]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("engine", "workers"), [("processes", 1), ("processes", 3), ("replay", 1), ("replay", 3)])
def test_an_engine_equals_inline_bit_for_bit(method, engine, workers, inline):
    expected, got = inline(method), tiny_run(method, engine=engine, workers=workers)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)
    assert results(got) == results(expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_rerun_is_the_same_and_another_seed_is_not(method, inline):
    expected = inline(method)
    assert without_times(tiny_run(method).history) == without_times(expected.history)
    assert without_times(tiny_run(method, seed=4).history) != without_times(expected.history)


def test_dropout_and_adam_replay_bit_for_bit():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16)))
    adam = {"training__optimizer__name": "adam", "training__optimizer__momentum": 0.0}
    expected, got = tiny_run("fedprox", task=task, **adam), tiny_run("fedprox", engine="replay", task=task, **adam)
    assert same_state(got.server.state, expected.server.state)
    assert all(torch.isfinite(v).all() for v in got.server.state.values())


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
