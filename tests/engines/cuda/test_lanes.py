"""Lanes on a GPU give what inline gives on that GPU. Skipped without CUDA; `replay` is the check on other machines."""

import os
import signal
import warnings
from dataclasses import replace

import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run, tiny_task, without_times

from fedloom import methods
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted
from fedloom.engines.cuda import lanes as module
from fedloom.methods import METHODS as REGISTRY

needs_gpu = pytest.mark.cuda
METHODS = [*sorted(REGISTRY), "fedavg+ft"]


def on_gpu(method, engine="lanes", **fields):
    return tiny_run(method, engine=engine, **{"engine__device": "cuda", **fields})


def furthest(one, other):
    """The largest difference between two runs' server states, relative to the values' size."""
    assert one.keys() == other.keys()
    gaps = [((one[n] - other[n]).abs().max() / other[n].abs().max().clamp_min(1e-3)).item() for n in one]
    return max(gaps, default=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_remedy_is_named():
    with pytest.raises(UserError, match="needs an NVIDIA GPU, and torch sees none; use engine.name = 'processes'"):
        tiny_run("fedavg", engine="lanes", engine__device="auto")


@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_lanes_equal_inline_bit_for_bit_in_deterministic_mode(method):
    fixed = {"engine__deterministic": True}
    expected, got = on_gpu(method, "inline", **fixed), on_gpu(method, workers=3, **fixed)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)


@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_lanes_are_within_float_tolerance_of_inline(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no method may fall back to eager
        got = on_gpu(method, workers=4)
    assert furthest(got.server.state, on_gpu(method, "inline").server.state) < 1e-4


@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_cohorts_are_within_float_tolerance_of_inline(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = on_gpu(method, workers=1, engine__cohort=3)
    assert furthest(got.server.state, on_gpu(method, "inline").server.state) < 1e-3


@needs_gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"engine__precision": "tf32"},
        {"engine__precision": "bf16"},
        {"engine__precision": "bf16", "engine__channels_last": True},
    ],
)
def test_precisions_learn_the_same_up_to_their_rounding(fields):
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    exact = on_gpu("fedavg", "inline", task=task)
    got = on_gpu("fedavg", task=task, **fields)
    assert 0 < furthest(got.server.state, exact.server.state) < 0.1
    same = on_gpu("fedavg", "inline", task=task, **fields)
    assert furthest(got.server.state, same.server.state) < 1e-3


@needs_gpu
def test_a_client_does_not_depend_on_its_lane_or_the_other_clients():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    fields = {"engine__deterministic": True, "training__epochs": 12, "training__optimizer__name": "adam"}
    one, many = (on_gpu("local", task=task, workers=n, **fields) for n in (1, 5))
    assert without_times(one.history) == without_times(many.history)
    assert [s.loss for s in one.scores] == [s.loss for s in many.scores]


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedcrl"])
@pytest.mark.parametrize("fields", [{}, {"engine__channels_last": True}, {"engine__compile": True}])
def test_two_cohorts_with_convolutions_and_dropout(method, fields):
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 22, 22)))
    # So short that the last digit stays the last digit; noise of 0.051 instead of 0.05 moves weights by 0.9% (FedAvg)
    # and 8% (FedCRL), longer training by other layouts alone 8% (FedCRL, 3 rounds of 6 epochs, on a CPU).
    common = {"task": task, "training__rounds": 2, "training__epochs": 3, "training__fraction": 1.0}
    common["training__optimizer__lr"] = 0.01
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="engine.compile|engine.cohort|a training step cannot be captured")
        got = on_gpu(method, workers=2, engine__cohort=2, **common, **fields)
    layout = {name: value for name, value in fields.items() if name == "engine__channels_last"}
    assert furthest(got.server.state, on_gpu(method, "inline", **common, **layout).server.state) < 2e-3


@needs_gpu
def test_cohorts_are_made_smaller_when_memory_runs_out(monkeypatch):
    scarce = iter([True, True, True])

    class Scarce(module.Cohort):
        def attempt(self, jobs):
            if next(scarce, False):
                raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
            return super().attempt(jobs)

    monkeypatch.setattr(module, "Cohort", Scarce)
    with pytest.warns(UserWarning, match="going on with") as told:
        got = on_gpu("fedavg", workers=2, engine__cohort=4)
    said = {str(w.message).split(":")[0] for w in told if "going on with" in str(w.message)}
    assert said == {"engine.workers", "engine.cohort"}
    assert furthest(got.server.state, on_gpu("fedavg", "inline").server.state) < 1e-3


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedcrl"])
def test_a_compiled_step_is_the_same_step(method):
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    fields = {"task": task, "training__epochs": 6, "training__fraction": 1.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="engine.compile")
        got = on_gpu(method, engine__compile=True, workers=2, **fields)
    assert furthest(got.server.state, on_gpu(method, "inline", **fields).server.state) < 1e-2


@needs_gpu
def test_a_step_that_cannot_be_captured_is_named_once_and_runs_eagerly():
    class Peeking(REGISTRY["fedavg"]):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            return value * 2 if value.item() > 1e6 else value

    try:
        with pytest.warns(UserWarning, match="cannot be captured") as told:
            got = on_gpu("peeking", workers=3, engine__deterministic=True)
        named = [str(w.message) for w in told if "captured" in str(w.message)]
        assert len(named) == 1
        assert "value.item() > 1e6" in named[0]
        assert same_state(got.server.state, on_gpu("fedavg", "inline", engine__deterministic=True).server.state)
    finally:
        methods.METHODS.pop("peeking")


@needs_gpu
def test_fewer_lanes_are_tried_when_memory_runs_out(monkeypatch):
    handle, first = module.handle, iter([True, True])

    def scarce(lane, job):
        if next(first, False):
            raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
        return handle(lane, job)

    fixed = {"engine__deterministic": True, "workers": 4}
    expected = on_gpu("fedavg", **fixed)
    monkeypatch.setattr(module, "handle", scarce)
    with pytest.warns(UserWarning, match="going on with") as told:
        got = on_gpu("fedavg", **fixed)
    said = sorted(str(w.message) for w in told if "going on with" in str(w.message))
    assert [s[-1] for s in said] == ["2", "3"]
    assert same_state(got.server.state, expected.server.state)


@needs_gpu
def test_memory_that_was_spilled_comes_back_to_the_gpu():
    fields = {"engine__deterministic": True, "training__fraction": 1.0}
    roomy, tight = (on_gpu("fedamp", storage__memory_mb=size, **fields) for size in (64, 1))
    assert without_times(tight.history) == without_times(roomy.history)


@needs_gpu
def test_an_error_in_a_client_ends_the_run_with_its_name():
    class Failing(REGISTRY["fedavg"]):
        def update(self, client):
            raise ValueError("no such thing")

    try:
        with pytest.raises(ValueError, match="no such thing") as error:
            on_gpu("failing", workers=3)
        assert "in a job of client" in error.value.__notes__[0]
    finally:
        methods.METHODS.pop("failing")


def test_no_more_lanes_than_the_longest_job_leaves_work_for():
    assert module.useful_lanes([10, 10, 10, 10]) == 4
    assert module.useful_lanes([40, 10, 10]) == 1
    assert module.useful_lanes([40, 30, 20, 10]) == 2
    assert module.useful_lanes([0]) == 1
    assert module.useful_lanes([]) == 1


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedcrl"])
def test_lanes_stopped_and_resumed_equal_the_uninterrupted_run_in_deterministic_mode(method, tmp_path):
    def run(name, **options):
        fields = {"engine__device": "cuda", "engine__deterministic": True, "storage__checkpoint_every": 1}
        return tiny_experiment(method, engine="lanes", workers=2, out=str(tmp_path / name), **fields, **options)

    def stop(record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    expected = run("whole")
    expected.run()
    with pytest.raises(Interrupted, match="stopped after round 2 of 3"):
        run("run", on_round=stop).run()
    resumed = run("run")
    resumed.run(resume=True)
    assert same_state(resumed.server.state, expected.server.state)
    assert without_times(resumed.history) == without_times(expected.history)
    models = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole" / "models").rglob("*.safetensors")]
    assert models
    for path in models:
        assert (tmp_path / "run" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()
