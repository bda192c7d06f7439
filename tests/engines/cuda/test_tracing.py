"""A step that was traced on one lane does the same to another lane's tensors: what `engine.compile` rests on."""

from dataclasses import replace

import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_run, tiny_task, without_times

from fedloom.core.job import perform
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.engines.base import Engine
from fedloom.engines.cuda.tracing import Compiled, Draws, trace
from fedloom.engines.recording import undone
from fedloom.methods import METHODS as REGISTRY


class Traced:
    """Like the stepper of a GPU's lanes with `compile`, without the compiler: the traced operations as they are."""

    fixed_memory = True

    def __init__(self, shared):
        self.shared = shared

    def run(self, lane, site, step, plan):
        for indices in plan.steps(lane.device):
            data = None if site.data is None else site.data[0].shape
            key = (site.site, tuple(map(len, indices)), data)
            if key not in site.captures:
                site.captures[key] = True
                with undone(lane, site):
                    step(indices)  # warm-up: statistics come into being
            if key not in self.shared:
                graph, draws, _ = trace(lane, site, step, indices)
                self.shared[key] = Compiled(graph, draws)
            self.shared[key].bind(lane, site)(indices)


class TracedEngine(Engine):
    name = "traced-for-tests"

    def __init__(self, setup, settings):
        super().__init__(setup, settings)
        shared = {}
        self.lanes = [Workspace(setup, stepper=Traced(shared), built=self.server_workspace.parts) for _ in range(2)]

    def run(self, jobs):
        for turn, job in enumerate(jobs):
            yield perform(self.lanes[turn % 2], job)


def few_sizes(task):
    """Batches of 16 and of 5 only: every size is traced anew, which takes its time."""
    train = [samples[:size] for samples, size in zip(task.federation.train, (32, 32, 21), strict=False)]
    return replace(task, federation=Federation(train, task.federation.test[:3]))


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_traced_steps_equal_eager_bit_for_bit(method):
    fields = {"task": few_sizes(tiny_task()), "training__rounds": 2, "training__fraction": 1.0}
    expected, got = tiny_run(method, **fields), tiny_run(method, engine="traced-for-tests", **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)


def test_dropout_is_drawn_before_the_traced_part():
    task = few_sizes(replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16))))
    fields = {"task": task, "training__rounds": 2, "training__fraction": 1.0}
    expected, got = tiny_run("fedprox", **fields), tiny_run("fedprox", engine="traced-for-tests", **fields)
    assert same_state(got.server.state, expected.server.state)


def test_drawings_are_noted_and_handed_out_again():
    generator = torch.Generator().manual_seed(1)
    with Draws() as draws:
        first = torch.rand(3, generator=generator)
        second = torch.empty(2).bernoulli_(0.5, generator=generator)
    generator.manual_seed(1)
    again = [draw(generator) for draw in draws.noted]
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], second)
    with Draws(given=again):
        assert torch.equal(torch.rand(3, generator=generator), first)
        assert torch.equal(torch.empty(2).bernoulli_(0.5, generator=generator), second)
