"""A step that was traced in one workspace does the same to another's tensors: what compiling and cohorts rest on."""

from dataclasses import replace

import pytest
import torch
from tiny import same_state, tiny_dataset, tiny_experiment, tiny_run, tiny_task, without_times

from fedloom.core.client import Client
from fedloom.core.execution import perform
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.engines.base import Engine
from fedloom.engines.recorded import tracing
from fedloom.engines.recorded.checks import touched, undone
from fedloom.engines.recorded.lane import bound
from fedloom.engines.recorded.tracing import compiled, trace
from fedloom.methods import METHODS as REGISTRY


class Traced:
    """Like the stepper of a lane with `compile`, without the compiler: the traced operations as they are."""

    fixed_memory = True

    def __init__(self, graphs):
        self.graphs = graphs

    def run(self, steps):
        steps.prepare()
        for row in steps.plan.steps(steps.workspace.device):
            data = None if steps.cache.data is None else steps.cache.data[0].shape
            key = (steps.cache.site, len(row), data)
            with undone(steps):
                steps.step(row)  # its statistics get their names
            if key not in self.graphs:
                self.graphs[key] = trace(steps, row)
            bound(self.graphs[key], [tensor.detach() for tensor in touched(steps)])(row)
        return steps.means()


class TracedEngine(Engine):
    name = "traced-for-tests"

    def __init__(self, setup, settings):
        super().__init__(setup, settings)
        graphs = {}
        self.lanes = [Workspace(setup, stepper=Traced(graphs), built=self.server_workspace.parts) for _ in range(2)]

    def run(self, jobs):
        for turn, job in enumerate(jobs):
            yield perform(self.lanes[turn % 2], job)


def few_sizes(task):
    """Batches of 16 and of 5 only: every size is traced anew, which takes its time."""
    train = [samples[:size] for samples, size in zip(task.federation.train, (32, 32, 21), strict=False)]
    return replace(task, federation=Federation(train, task.federation.test[:3]))


def equals_inline(method, task):
    fields = {"task": few_sizes(task), "training__rounds": 2, "training__fraction": 1.0}
    expected, got = tiny_run(method, **fields), tiny_run(method, engine="traced-for-tests", **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)


QUICK = ("fedavg", "fedproto", "fedrep", "scaffold", "perfedavg")
METHODS = [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in sorted(REGISTRY)]


@pytest.mark.parametrize("method", METHODS)
def test_traced_steps_equal_eager_to_the_bit(method):
    equals_inline(method, tiny_task())


def test_dropout_is_drawn_inside_the_traced_step():
    equals_inline("fedprox", replace(tiny_task("cnn2", dropout=0.3), dataset=tiny_dataset(shape=(1, 16, 16))))


def some_steps(**fields):
    """The steps of a client's first fit, ready to be taken."""
    setup = tiny_experiment("fedavg", task=few_sizes(tiny_task()), **fields).setup
    found = []

    class Keeping:
        fixed_memory = True

        def run(self, steps):
            steps.prepare()
            found.append(steps)
            return {}

    workspace = Workspace(setup, stepper=Keeping())
    setup.method.update(Client(workspace, id=0, round=1, job="update", samples=setup.task.samples(0), first=True))
    return found[0]


def memory(steps):
    return [tensor.clone() for tensor in touched(steps)]


def test_tracing_leaves_no_trace():
    steps = some_steps()
    before = memory(steps)
    graph = trace(steps, next(steps.plan.steps(torch.device("cpu"))))
    assert all(torch.equal(a, b) for a, b in zip(before, memory(steps), strict=True))
    assert len([node for node in graph.graph.nodes if node.op == "placeholder"]) == len(before) + 1


def test_a_traced_step_reads_nothing_but_its_arguments():
    """Weights that were a constant of the graph would be those of the workspace that it was traced in."""
    steps = some_steps()
    first, second = list(steps.plan.steps(torch.device("cpu")))[:2]
    graph = trace(steps, first)
    copies = memory(steps)
    steps.step(second)
    expected = memory(steps)
    with torch.no_grad():
        for tensor in touched(steps):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        graph(*copies, second)
    assert all(torch.equal(a, b) for a, b in zip(copies, expected, strict=True))


def test_a_compiler_that_fails_is_named_and_the_step_runs_as_it_is(monkeypatch):
    def fails(graph, inputs):
        raise TypeError("not today")

    monkeypatch.setattr(tracing, "compile_graph", fails)
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="engine.compile: a training step runs uncompiled: not today"):
        function = compiled(lambda x: x.add_(1), [x])
    x.zero_()  # tracing has done it once
    function(x)
    assert x.tolist() == [1.0, 1.0]


def test_a_compiler_that_runs_out_of_memory_is_the_engines_to_handle(monkeypatch):
    def fails(graph, inputs):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(tracing, "compile_graph", fails)
    with pytest.raises(torch.OutOfMemoryError):
        compiled(lambda x: x.add_(1), [torch.ones(2)])


@pytest.mark.slow
def test_a_compiled_step_is_the_traced_step():
    steps = some_steps()
    first, second = list(steps.plan.steps(torch.device("cpu")))[:2]
    graph = trace(steps, first)
    function = compiled(graph, [*memory(steps), first])
    assert function is not graph
    mine, theirs = memory(steps), memory(steps)
    with torch.no_grad():
        function(*mine, second)
        graph(*theirs, second)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
