"""A lane of one client at a time gives what inline gives, to the bit; its steps are captured once, and replayed."""

import math
from dataclasses import replace

import pytest
import torch
from cohorts import LaneEngine, Recorder, alternately, check, lane_of, updates
from references import figures
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run_with_memory, tiny_task, without_times
from torch.nn.functional import cross_entropy

from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.engines.recorded import lane as module
from fedloom.engines.recorded.recorder import UNROLL
from fedloom.methods import METHODS as REGISTRY

FedAvg = REGISTRY["fedavg"]


pytestmark = pytest.mark.usefixtures("_no_fallback")


def setup_of(method=None, **fields):
    setup = tiny_experiment("fedavg", **fields).setup
    return setup if method is None else replace(setup, method=method())


def of_size(setup, *sizes):
    """The same setup, with clients of these sizes."""
    train = [samples[:size] for samples, size in zip(setup.task.federation.train, sizes, strict=False)]
    task = replace(setup.task, federation=Federation(train, setup.task.federation.test[: len(sizes)]))
    return replace(setup, task=task)


def equals_inline(method, **fields):
    got, kept = tiny_run_with_memory(method, engine="lane-for-tests", workers=1, **fields)
    expected, expected_kept = tiny_run_with_memory(method, **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)
    assert figures(got.scores) == figures(expected.scores)
    assert kept.keys() == expected_kept.keys()
    assert all(same_state(kept[client], expected_kept[client]) for client in kept)
    return LaneEngine.recorder


@pytest.mark.parametrize("method", alternately([*sorted(REGISTRY.keys() - {"untrained"}), "fedavg+ft"], first=1))
def test_every_method_equals_inline_to_the_bit(method):
    recorder = equals_inline(method, training__rounds=2, training__epochs=2)
    assert recorder.replays > recorder.recorded > 0


def test_dropout_adam_and_channels_last():
    task = replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(3, 16, 16)))
    fields = {"task": task, "training__rounds": 2, "training__optimizer": {"name": "adam", "lr": 0.003, "keep": True}}
    equals_inline("fedprox", **fields)
    equals_inline("fedprox", engine__channels_last=True, **fields)


def test_an_objective_without_labels():
    equals_inline("fedavg", objective="moco", training__rounds=2)


def test_steps_of_one_size_are_captured_once():
    setup, recorder = of_size(setup_of(), 32, 32, 32), Recorder()  # two steps of 16 each
    lane = lane_of(setup, recorder=recorder)
    for round in (1, 2, 3):
        check(setup, lane, updates(setup, range(3), round))
    assert (recorder.recorded, recorder.replays) == (1, 9)


@pytest.mark.parametrize("epochs", [1, 3, 10, 16])
def test_many_steps_are_few_graphs(epochs):
    setup, recorder = of_size(setup_of(training__epochs=epochs), 32), Recorder()
    lane = lane_of(setup, recorder=recorder)
    check(setup, lane, updates(setup, [0]))
    used, left = [], 2 * epochs
    for many in UNROLL:
        used, left = [*used, left // many], left % many
    assert recorder.replays == sum(used)
    assert recorder.recorded == len([times for times in used if times])


def test_a_single_step_is_captured_when_it_comes_again():
    setup, recorder = of_size(setup_of(), 16), Recorder()
    lane = lane_of(setup, recorder=recorder)
    for round, (recorded, replays) in enumerate([(0, 0), (1, 1), (1, 2)], start=1):
        check(setup, lane, updates(setup, [0], round))
        assert (recorder.recorded, recorder.replays) == (recorded, replays)


def test_only_so_many_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(module, "GRAPHS", 2)
    setup, recorder = of_size(setup_of(training__epochs=2), 16, 12, 9), Recorder()
    lane = lane_of(setup, recorder=recorder)
    for clients in ([0, 1], [0, 1], [2], [1], [0]):  # the third size drives the first one out
        check(setup, lane, updates(setup, clients))
        assert len(lane._graphs) <= 2
    assert recorder.recorded == 4
    assert recorder.replays == 7


def test_rows_that_outgrow_the_feed(monkeypatch):
    monkeypatch.setattr(module, "CAPACITY", 64)
    setup, recorder = of_size(setup_of(training__epochs=2), 16, 48), Recorder()
    lane = lane_of(setup, recorder=recorder)
    check(setup, lane, updates(setup, [0]))
    feed = lane._feed
    check(setup, lane, updates(setup, [1], 2))
    assert lane._feed is not feed
    check(setup, lane, updates(setup, [0, 1], 3))
    assert recorder.recorded == 2 + 1  # two sizes of graphs; the one that read the old feed again


def test_a_step_that_cannot_be_captured_is_named_once_and_runs_eagerly():
    class Peeking(FedAvg):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            return value * 2 if value.item() > 1e6 else value

    setup, recorder = setup_of(Peeking), Recorder()
    lane = lane_of(setup, recorder=recorder)
    jobs = updates(setup, range(3))
    with pytest.warns(UserWarning, match="runs eagerly") as noticed:
        results = lane.launch(jobs)
    for got, again, job in zip(results, lane.launch(jobs), jobs, strict=True):
        alone = dict(perform(Workspace(setup), job).message)
        assert same_state(dict(got.message), alone)
        assert same_state(dict(again.message), alone)
    assert len(noticed) == 1
    assert "value.item() > 1e6" in str(noticed[0].message)
    assert "reads a tensor's value on the host" in str(noticed[0].message)
    assert recorder.recorded == 0


def test_a_capture_that_fails_is_named_and_its_work_done_eagerly():
    setup, recorder = of_size(setup_of(), 32), Recorder(error=RuntimeError("no capture today"))
    lane = lane_of(setup, recorder=recorder)
    with pytest.warns(UserWarning, match="run eagerly: no capture today") as noticed:
        check(setup, lane, updates(setup, [0]))
    check(setup, lane, updates(setup, [0], 2))  # named once
    assert len(noticed) == 1


def test_memory_that_runs_out_is_the_engines_to_handle():
    setup, recorder = of_size(setup_of(), 32), Recorder(error=torch.OutOfMemoryError("no memory today"))
    lane = lane_of(setup, recorder=recorder)
    with pytest.raises(torch.OutOfMemoryError, match="no memory today"):
        lane.launch(updates(setup, [0]))
    recorder.error = None
    check(setup, lane, updates(setup, [0]))
    assert recorder.recorded == 1


def test_capturing_changes_nothing():
    """Also where the first step of a client is where a graph is captured: its warm-up is undone."""
    setup = setup_of(training__optimizer={"name": "adam", "lr": 0.01, "keep": True}, training__epochs=3)
    lane = lane_of(setup)
    jobs = updates(setup, [0, 1, 2])
    for got, job in zip(lane.launch(jobs), jobs, strict=True):
        alone = perform(Workspace(setup), job)
        assert same_state(dict(got.message), dict(alone.message))
        assert same_state(got.memory, alone.memory)
        assert got.read().loss == alone.loss


def test_features_move_to_larger_memory():
    class Growing(FedAvg):
        def update(self, client):
            z, y = client.features()
            if client.round == 2:
                z, y = torch.cat([z] * 4), torch.cat([y] * 4)
            client.fit("model.head", self.head_loss, data=(z * client.round, y))

        def head_loss(self, client, batch):
            return cross_entropy(client.model.head(batch.x), batch.y)

    setup = setup_of(Growing)
    lane = lane_of(setup)
    for round in (1, 2, 3):
        check(setup, lane, updates(setup, range(3), round))


def test_learning_rates_reach_captured_steps():
    class Varying(FedAvg):
        def update(self, client):
            client.fit("model", self.loss, lr=0.1 / (1 + client.id + client.round))

    setup, recorder = of_size(setup_of(Varying), 32, 32, 32), Recorder()
    lane = lane_of(setup, recorder=recorder)
    for round in (1, 2):
        check(setup, lane, updates(setup, range(3), round))
    assert recorder.recorded == 1


def test_what_a_client_raises_is_its_result():
    class Failing(FedAvg):
        def update(self, client):
            super().update(client)
            if client.id == 1:
                raise ValueError("no more")

    lane = lane_of(setup := setup_of(Failing))
    first, failed, third = lane.launch(updates(setup, range(3)))
    assert "no more" in failed.error.why
    assert first.error is third.error is None


def test_a_part_that_was_rebound_is_refused():
    class Rebinding(FedAvg):
        def update(self, client):
            super().update(client)
            client.model.head.bias.data = client.model.head.bias + 1
            super().update(client)

    lane = lane_of(setup := setup_of(Rebinding))
    (result,) = lane.launch(updates(setup, [0]))
    assert "'model.head.bias' was rebound" in result.error.why


@pytest.mark.parametrize("kind", ["evaluate", "global", "generalise"])
def test_other_kinds_of_jobs(kind):
    setup = setup_of()
    lane, message = lane_of(setup), Message(Workspace(setup).downward())
    check(setup, lane, [Job(kind, 1, message, client=c, clients=(c,)) for c in (0, 1)])


def test_the_largest_magnitude_of_each_message():
    setup = setup_of()
    for slots in (1, 3):
        lane = lane_of(setup, slots)
        results = lane.launch(updates(setup, range(3)))
        assert lane.largest(results).shape == (3,)
        for value, result in zip(lane.largest(results).tolist(), results, strict=True):
            assert value == max(t.abs().max().item() for t in result.message.values() if t.is_floating_point())
        results[1].message["model.head.bias"][2] = math.nan
        assert lane.largest(results).isfinite().tolist() == [True, False, True]


def test_a_compiled_step_falls_back_with_a_warning(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", fails)
    setup = of_size(setup_of(), 32)
    lane = lane_of(setup, compile=True)
    with pytest.warns(UserWarning, match="engine.compile: a training step runs uncompiled: no compiler here"):
        check(setup, lane, updates(setup, [0]))
    check(setup, lane, updates(setup, [0], 2))


def test_a_compiled_step_is_the_same_step(monkeypatch):
    """With the traced operations in place of the compiler's, which are the same up to rounding."""
    made = []
    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", lambda graph, _: made.append(1) or graph)
    setup = of_size(setup_of(training__epochs=2), 32, 21)
    lane = lane_of(setup, compile=True)
    for round in (1, 2):
        check(setup, lane, updates(setup, [0, 1], round))
    assert len(made) == 1  # steps of 16; those of 5 come one at a time


@pytest.mark.parametrize("compile", [False, True])
def test_lanes_that_share_what_they_know(monkeypatch, compile):
    """A step that one lane has checked and compiled is taken by another: with its statistics."""
    monkeypatch.setattr("fedloom.engines.recorded.tracing.compile_graph", lambda graph, _: graph)
    setup = of_size(setup_of(training__epochs=2), 32, 21)
    one, other = lane_of(setup, compile=compile), lane_of(setup, compile=compile)
    other.shared = one.shared
    for round in (1, 2):
        for lane in (one, other):
            check(setup, lane, updates(setup, [0, 1], round))
