"""Clients that take their steps together end where each of them ends alone: every method, on any machine."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run, tiny_task

from fedloom.engines.base import Engine
from fedloom.engines.cohort import Cohort
from fedloom.engines.replay import Replay
from fedloom.job import Job, perform
from fedloom.lane import Eager, Lane
from fedloom.message import Message
from fedloom.methods import REGISTRY


class Shelf:
    def __init__(self, capacity):
        self.capacity = capacity

    def fill(self, values):
        self.values, self.position = torch.from_numpy(values), 0

    @contextmanager
    def undone(self):
        before = self.position
        yield
        self.position = before

    def take(self, count):
        self.position += count
        return self.values[self.position - count : self.position]


class Cpu:
    """A device on which nothing need be recorded."""

    def __init__(self):
        self.refused, self.kinds = [], set()

    feed = staticmethod(Shelf)

    def compiled(self, function, inputs):
        return function

    def record(self, work, lanes):
        self.kinds.add(len(lanes))
        return work

    def refuse(self, site, error):
        self.refused.append(error)

    def nearly_done(self):
        pass


class CohortEngine(Engine):
    name = "cohort-for-tests"
    last = None

    def __init__(self, setup, settings):
        super().__init__(setup, settings)
        self.cpu = Cpu()
        CohortEngine.last = self.cpu

        def new_lane(stepper):
            return Lane(setup, stepper=stepper, built=self.home.parts)

        self.cohort = Cohort(settings.workers or 3, new_lane, Replay, self.cpu, nullcontext)

    def run(self, jobs):
        waiting = iter(jobs)
        while wave := list(islice(waiting, self.settings.workers or 3)):
            yield from self.cohort.attempt(wave)

    def close(self):
        self.cohort.close()
        super().close()


def agree(got, expected, tolerance=2e-5):
    assert got.server.state.keys() == expected.server.state.keys()
    for name, value in expected.server.state.items():
        torch.testing.assert_close(got.server.state[name], value, rtol=1e-4, atol=tolerance, msg=name)
    assert [r["loss"] for r in got.history] == pytest.approx([r["loss"] for r in expected.history], rel=1e-3)


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_in_step_every_method_ends_where_it_ends_alone(method):
    fields = {"training__rounds": 2}
    agree(tiny_run(method, engine="cohort-for-tests", **fields), tiny_run(method, **fields))
    assert not CohortEngine.last.refused
    assert method == "centralized" or max(CohortEngine.last.kinds) > 1


@pytest.mark.parametrize(
    ("model", "options"),
    [("cnn2", {"dropout": 0.3}), ("cnn4", {"norm": True}), ("cnn4", {"norm": False, "flat": True})],
)
def test_in_step_convolutions_dropout_and_batch_norm(model, options):
    task = replace(tiny_task(model, **options), dataset=tiny_dataset(shape=(1, 22, 22)))
    fields = {"task": task, "training__rounds": 2, "training__optimizer__lr": 0.01}
    agree(tiny_run("fedprox", engine="cohort-for-tests", **fields), tiny_run("fedprox", **fields))


def test_in_step_over_several_epochs_with_adam_whose_state_is_kept():
    # without batch-norm, before which a bias has no gradient but rounding, which Adam makes as large as any
    fields = {"task": tiny_task(norm=False), "training__epochs": 3, "training__fraction": 1.0, "workers": 6}
    fields["training__optimizer"] = {"name": "adam", "lr": 0.003, "keep": True}
    agree(tiny_run("fedrep", engine="cohort-for-tests", **fields), tiny_run("fedrep", **fields))
    assert CohortEngine.last.kinds == {4}  # of six: two are smaller than a batch


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.usefixtures("registry")
def test_steps_that_cannot_be_recorded_are_taken_alone():
    class Peeking(REGISTRY["fedavg"]):
        def loss(self, client, batch):
            value = super().loss(client, batch)
            return value * (2.0 if value.item() > 0 else 1.0)

    setup = replace(tiny_experiment("fedavg").setup, method=Peeking())
    jobs = [Job("update", 1, Message(Lane(setup).downward()), client=client) for client in range(3)]
    cpu = Cpu()
    cohort = Cohort(3, lambda stepper: Lane(setup, stepper=stepper), Eager, cpu, nullcontext)
    for got, job in zip(cohort.attempt(jobs), jobs, strict=True):
        assert same_state(got.message.tensors, perform(Lane(setup), job).message.tensors)
    assert "reads a tensor's value on the host" in str(cpu.refused[0])
    cohort.close()


@pytest.mark.usefixtures("registry")
def test_a_client_that_raises_leaves_the_others_alone():
    class Failing(REGISTRY["fedavg"]):
        def update(self, client):
            super().update(client)
            if client.id == 1:
                raise ValueError("no more")
            super().update(client)

    setup = replace(tiny_experiment("fedavg").setup, method=Failing())
    jobs = [Job("update", 1, Message(Lane(setup).downward()), client=client) for client in range(3)]
    cohort = Cohort(3, lambda stepper: Lane(setup, stepper=stepper), Replay, Cpu(), nullcontext)
    for _ in range(2):  # and the cohort goes on with other jobs
        first, failed, third = cohort.attempt(jobs)
        assert "no more" in failed.error.why
        for got, job in ((first, jobs[0]), (third, jobs[2])):
            for name, value in perform(Lane(setup), job).message.tensors.items():
                torch.testing.assert_close(got.message[name], value, rtol=1e-4, atol=1e-5)
    cohort.close()
