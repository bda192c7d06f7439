"""Lanes on a GPU give what inline gives on that GPU. Skipped without CUDA; `replay` is the check on other machines."""

import gc
import math
import os
import signal
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cohorts import Recorder, close, updates
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run, tiny_task, without_times

from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.failures import Failure
from fedloom.core.flat_state import FlatState
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.signals import Interrupted
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.engines import EngineSettings
from fedloom.engines.cuda import lanes as module
from fedloom.engines.cuda.lanes import AHEAD, Batch, Lanes
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
    with pytest.raises(UserError, match="needs an NVIDIA GPU, but torch sees none; use engine.name = 'processes'"):
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
def test_a_server_that_averages_the_heads_of_all_clients():
    method = {"name": "fedper", "average_heads": True, "heads_of": "all"}
    got, expected = on_gpu(method), on_gpu(method, "inline", **{"engine__device": "cpu"})
    assert furthest({n: v.cpu() for n, v in got.server.state.items()}, expected.server.state) < 1e-3


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
    one, many = (on_gpu("fedavg", task=task, engine__cohort=cohort, **fields) for cohort in (1, 3))
    assert 0 < furthest(one.server.state, exact.server.state) < 0.1
    assert 0 < furthest(many.server.state, exact.server.state) < 0.1  # other products: other rounding
    same = on_gpu("fedavg", "inline", task=task, **fields)
    assert furthest(one.server.state, same.server.state) < 1e-3


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
        warnings.filterwarnings("error", message="engine.compile|engine.cohort|a training step cannot be recorded")
        got = on_gpu(method, workers=2, engine__cohort=2, **common, **fields)
    layout = {name: value for name, value in fields.items() if name == "engine__channels_last"}
    assert furthest(got.server.state, on_gpu(method, "inline", **common, **layout).server.state) < 2e-3


@needs_gpu
def test_cohorts_are_made_smaller_when_memory_runs_out(monkeypatch):
    scarce = iter([True, True, True])

    class Scarce(module.Cohort):
        def launch(self, jobs):
            if next(scarce, False):
                raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
            return super().launch(jobs)

    monkeypatch.setattr(module, "Cohort", Scarce)
    with pytest.warns(UserWarning, match="continuing with") as noticed:
        got = on_gpu("fedavg", workers=2, engine__cohort=4)
    said = {str(w.message).split(":")[0] for w in noticed if "continuing with" in str(w.message)}
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

    with pytest.warns(UserWarning, match="cannot be captured") as noticed:
        got = on_gpu("peeking", workers=3, engine__deterministic=True)
    named = [str(w.message) for w in noticed if "captured" in str(w.message)]
    assert len(named) == 1
    assert "value.item() > 1e6" in named[0]
    assert same_state(got.server.state, on_gpu("fedavg", "inline", engine__deterministic=True).server.state)


@needs_gpu
def test_fewer_lanes_are_tried_when_memory_runs_out(monkeypatch):
    first = iter([True, True])

    class Scarce(module.Lane):
        def launch(self, jobs):
            if next(first, False):
                raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
            return super().launch(jobs)

    fixed = {"engine__deterministic": True, "workers": 4}
    expected = on_gpu("fedavg", **fixed)
    monkeypatch.setattr(module, "Lane", Scarce)
    with pytest.warns(UserWarning, match="continuing with") as noticed:
        got = on_gpu("fedavg", **fixed)
    said = sorted(str(w.message) for w in noticed if "continuing with" in str(w.message))
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

    with pytest.raises(ValueError, match="no such thing") as error:
        on_gpu("failing", workers=3)
    assert "in a job of client" in error.value.__notes__[0]


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


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_what_auto_chooses_equals_inline_within_float_tolerance(method):
    got = on_gpu(method, workers=None)
    assert furthest(got.server.state, on_gpu(method, "inline").server.state) < 1e-3


@needs_gpu
def test_a_gpu_without_determinism_ends_near_a_cpu():
    """The draws are the same on both: what differs is rounding."""
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    fields = {"task": task, "training__rounds": 2}
    assert furthest(on_gpu("fedavg", **fields).server.state, _on_cpu(tiny_run("fedavg", **fields))) < 1e-3


def _on_cpu(run):
    return {name: tensor.cuda() for name, tensor in run.server.state.items()}


# on a CPU, with streams and events that have nothing to wait for


class Stream:
    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        return Event()


class Event:
    def __init__(self, blocking=False):
        self.recorded = False

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded


class Here(Lanes):
    """The engine, on this machine."""

    name = "lanes-for-tests"

    def _device(self):
        return torch.device("cpu")

    def hints(self):
        return []


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(module, "Graphs", lambda stream: Recorder())
    monkeypatch.setattr(module, "free_memory", lambda device: 2**33)


def few_sizes():
    """Batches of 16 and of 5 only: every size is traced anew, which takes its time."""
    task = tiny_task(norm=False)
    train = [samples[: (37, 32, 21)[i % 3]] for i, samples in enumerate(task.federation.train)]
    train[4:] = [samples[:21] for samples in task.federation.train[:2]]
    return replace(task, federation=Federation(train, task.federation.test))


def small_setup():
    return tiny_experiment("fedavg", task=few_sizes()).setup


def engine_of(setup=None, **settings):
    return Here(setup or small_setup(), EngineSettings(**settings))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("method", "workers"), [("fedavg", 1), ("fedrep", 3), ("scaffold", 2), ("fedamp", 3), ("centralized", 3)]
)
def test_the_engine_equals_inline_to_the_bit_with_one_client_at_a_time(method, workers):
    fields = {"engine__deterministic": True, "training__rounds": 2}
    got, expected = tiny_run(method, engine="lanes-for-tests", workers=workers, **fields), tiny_run(method, **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)
    assert [(s.client, s.right, s.loss) for s in got.scores] == [(s.client, s.right, s.loss) for s in expected.scores]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_engine_with_cohorts_equals_inline_within_float_tolerance(workers):
    fields = {"training__rounds": 2, "training__fraction": 1.0, "task": few_sizes()}
    got = tiny_run("fedavg", engine="lanes-for-tests", workers=workers, engine__cohort=2, **fields)
    expected = tiny_run("fedavg", **fields)
    close(got.server.state, expected.server.state)
    for mine, theirs in zip(got.history, expected.history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("workers", "cohort"), [(1, None), (3, None), (1, 2), (2, 4)])
def test_results_come_in_the_order_of_jobs_of_any_kind(workers, cohort):
    setup = small_setup()
    settings = {"workers": workers, "cohort": cohort} if cohort else {"workers": workers, "deterministic": True}
    message = Message(Workspace(setup).downward())
    jobs = [
        *updates(setup, [2, 0, 4]),
        Job("global", 1, message, clients=(1,)),
        *updates(setup, [1], 2),
        *[Job("evaluate", 1, message, client=c) for c in (3, 1, 0)],
        *updates(setup, [5, 3, 2, 1, 0, 2, 3], 3),
    ]
    with engine_of(setup, **settings) as engine:
        for _ in range(2):
            results = list(engine.run(iter(jobs)))
            assert [r.client for r in results] == [job.client for job in jobs]
            for got, job in zip(results, jobs, strict=True):
                alone = perform(Workspace(setup), job)
                assert [s.right for s in got.scores] == [s.right for s in alone.scores]
                assert got.answers is None
                assert (got.message is None) == (alone.message is None)
                if alone.message is not None:
                    close(got.message, alone.message)
                    assert isinstance(got.loss, float)
                    assert got.message.finite


@pytest.mark.usefixtures("cpu")
def test_jobs_are_taken_no_further_ahead_than_the_lanes_can_use():
    setup = small_setup()
    taken = []

    def jobs():
        for job in updates(setup, [0, 1, 2, 3] * 20):
            taken.append(job)
            yield job

    with engine_of(setup, workers=2, deterministic=True) as engine:
        results = engine.run(jobs())
        for done in range(1, 10):
            next(results)
            assert len(taken) <= done + AHEAD * 2
        results.close()
        assert len(list(engine.run(iter(updates(setup, [0, 1]))))) == 2  # nothing of the last round is left


@pytest.mark.usefixtures("cpu")
def test_a_client_that_fails_is_a_result_and_the_others_are_theirs():
    class Failing(REGISTRY["fedavg"]):
        def update(self, client):
            super().update(client)
            if client.id == 1:
                raise ValueError("no more")

    setup = replace(small_setup(), method=Failing())
    for settings in ({"workers": 2, "deterministic": True}, {"workers": 1, "cohort": 3}):
        with engine_of(setup, **settings) as engine:
            results = list(engine.run(iter(updates(setup, [0, 1, 2, 3]))))
        assert [r.error is not None for r in results] == [False, True, False, False]
        assert all(isinstance(r.loss, float) for r in results if r.error is None)


def sent(client, value, loss=1.0):
    tensors = {"weight": torch.full((2, 3), value), "count": torch.tensor(7)}
    return Result(client, message=Message(FlatState.of(tensors), client=client), loss=torch.tensor(loss))


def failed(client):
    return Result(client, error=Failure("raised", "no"))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2.0, 3.0), (1.0, math.nan, 3.0), (None, math.nan, 1.0), (math.nan, None, 1.0), (None, 1.0, math.nan),
        (math.inf, None, None), (None, None, None), (None, math.nan, 2.0, None, 3.0, -math.inf, 1.0),
    ],
)  # fmt: skip
def test_no_message_that_is_not_finite_passes_for_one_that_is(values):
    class OneByOne(module.Lane):
        def __init__(self):
            pass

    batch = Batch()
    results = [failed(i) if v is None else sent(i, v, loss=float(i)) for i, v in enumerate(values)]
    batch.launched(OneByOne(), results)
    for i, (result, value) in enumerate(zip(batch.read(), values, strict=True)):
        if value is None:
            assert result.message is None
            assert result.loss is None
        else:
            assert result.loss == i
            assert result.message.not_finite() == (None if math.isfinite(value) else "weight")
    assert batch.read() is results


@pytest.mark.usefixtures("cpu")
def test_a_loss_that_is_not_finite_is_a_number_all_the_same():
    batch = Batch()
    batch.launched(module.Lane.__new__(module.Lane), [sent(0, 1.0, loss=math.nan), sent(1, 1.0, loss=math.inf)])
    first, second = batch.read()
    assert math.isnan(first.loss)
    assert second.loss == math.inf


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("workers", "cohort", "remedies"), [
    (3, None, ["workers: 3", "workers: 2"]),
    (2, 4, ["workers: 2", "cohort: 4", "cohort: 2"]),
])  # fmt: skip
def test_with_less_memory_it_continues_with_fewer_lanes_then_with_fewer_clients(monkeypatch, workers, cohort, remedies):
    setup, scarce = small_setup(), iter(remedies)

    def scarcely(kind):
        class Scarce(kind):
            def launch(self, jobs):
                if next(scarce, None):
                    raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
                return super().launch(jobs)

        return Scarce

    for name in ("Lane", "Cohort"):
        monkeypatch.setattr(module, name, scarcely(getattr(module, name)))
    settings = {"workers": workers, "cohort": cohort} if cohort else {"workers": workers, "deterministic": True}
    jobs = updates(setup, [0, 1, 2, 3, 1, 2, 0, 3, 1])
    with engine_of(setup, **settings) as engine, warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        results = list(engine.run(iter(jobs)))
    said = [str(w.message) for w in noticed if "continuing with" in str(w.message)]
    assert [words.removeprefix("engine.").split(" ")[:2] for words in said] == [r.split(" ") for r in remedies]
    for got, job in zip(results, jobs, strict=True):
        close(got.message, perform(Workspace(setup), job).message)


@pytest.mark.usefixtures("cpu")
def test_with_less_memory_no_message_that_is_not_finite_passes_for_one_that_is(monkeypatch):
    """A batch that was too large is done in parts: what is known of the last part is not known of the first."""

    class Diverging(REGISTRY["fedavg"]):
        def update(self, client):
            super().update(client)
            if client.id == 0:
                client.model.head.bias.data.fill_(math.nan)

    scarce = iter([True])

    class Scarce(module.Cohort):
        def launch(self, jobs):
            if next(scarce, False):
                raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")
            return super().launch(jobs)

    monkeypatch.setattr(module, "Cohort", Scarce)
    setup = replace(small_setup(), method=Diverging())
    with engine_of(setup, workers=1, cohort=4) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = list(engine.run(iter(updates(setup, [0, 1, 2, 3]))))
    assert [r.message.not_finite() for r in results] == ["model.head.bias", None, None, None]


@pytest.mark.usefixtures("cpu")
def test_when_nothing_is_left_to_give_memory_is_the_error(monkeypatch):
    class Scarce(module.Lane):
        def launch(self, jobs):
            raise torch.OutOfMemoryError("CUDA out of memory (so says the test)")

    monkeypatch.setattr(module, "Lane", Scarce)
    setup = small_setup()
    with engine_of(setup, workers=1, deterministic=True) as engine, pytest.raises(torch.OutOfMemoryError):
        list(engine.run(iter(updates(setup, [0]))))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("settings", [{"workers": 2, "deterministic": True}, {"workers": 1, "cohort": 2}])
def test_a_choice_is_settings_that_choose_the_same(settings):
    with engine_of(**settings) as engine:
        choice = engine.choice()
    assert choice == {"workers": engine.tuning.lanes, "cohort": engine.tuning.clients}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("fields", [{"engine__deterministic": True}, {"engine__cohort": 2}])
def test_a_stopped_run_goes_on_with_what_was_chosen(tmp_path, fields):
    def run(on_round=None, **options):
        fields_of = {
            "engine": "lanes-for-tests",
            "workers": None,
            "storage__checkpoint_every": 1,
            "task": few_sizes(),
            **fields,
        }
        return tiny_experiment("fedavg", out=str(tmp_path / "run"), on_round=on_round, **fields_of, **options)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stop).run()
    resumed = run()
    resumed.run(resume=True)
    assert len(resumed.history) == 3


@pytest.mark.usefixtures("cpu")
def test_closing_lets_go_of_the_lanes():
    engine = engine_of(workers=2, deterministic=True)
    list(engine.run(iter(updates(engine.setup, [0, 1]))))
    assert any(lane.lane is not None for lane in engine._lanes)
    engine.close()
    gc.collect()
    assert all(lane.lane is None for lane in engine._lanes)
    assert torch.autograd.is_multithreading_enabled()
