"""A cohort on a CPU, on a device that does as CUDA graphs do: work is recorded once and replayed in the same memory."""

from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.core.job import Job, perform
from fedloom.core.message import Message
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine
from fedloom.engines.cuda.cohort import Cohort
from fedloom.engines.recording import storage
from fedloom.engines.replay import Replay

NOBODYS = -(10**6)
"""A sample that is not there: who reads on beyond a plan falls over it."""


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = {storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [(i, t) for i, t in enumerate(made) if storage(t) not in read]
        self.operations.append((func, args, kwargs or {}, fresh, made))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, fresh, _ in self.operations:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for i, tensor in fresh:
                tensor.detach().copy_(again[i])


class Feed:
    def __init__(self, capacity):
        self.capacity = capacity
        self.block = torch.zeros(1 + capacity, dtype=torch.int64)
        self.position, self.samples = self.block[0], self.block[1:]

    def fill(self, values):
        self.block.fill_(NOBODYS)
        self.block[0] = 0
        self.block[1 : 1 + len(values)] = torch.from_numpy(np.ascontiguousarray(values))

    @contextmanager
    def undone(self):
        before = self.position.clone()
        yield
        self.position.copy_(before)

    def take(self, count):
        taken = self.samples.index_select(0, self.position + torch.arange(count))
        self.position.add_(count)
        return taken


class Recorder:
    """The device; it remembers what it was asked for."""

    least = 64
    lanes = ()
    """Of the cohort, once it is there: who draws must have been named."""

    def __init__(self):
        self.feeds, self.refused, self.separated, self.replays = [], [], [], 0

    def feed(self, capacity):
        self.feeds.append(Feed(max(self.least, capacity)))
        return self.feeds[-1]

    def compiled(self, function, inputs):
        return function

    def record(self, work, drawing):
        others = [lane.generator for lane in self.lanes if lane not in drawing]
        states = [generator.get_state() for generator in others]
        with self.feeds[-1].undone():
            work()  # warm-up
        assert all(torch.equal(g.get_state(), before) for g, before in zip(others, states, strict=True))
        with Recording() as recording:
            work()  # a capture would not do it; what it does is undone

        def replay():
            self.replays += 1
            recording.replay()

        return replay

    def settle(self):
        pass

    def refuse(self, site, error):
        self.refused.append(error)

    def separate(self, error):
        self.separated.append(error)

    def nearly_done(self):
        pass


def cohort_of(setup, many=3, stepper=Replay, device=None):
    device = device or Recorder()
    cohort = Cohort(many, lambda seat: Workspace(setup, stepper=seat), stepper, device)
    device.lanes = cohort.lanes
    return cohort


class CohortEngine(Engine):
    """`workers` lanes in step."""

    name = "cohort-for-tests"
    last = None

    def __init__(self, setup, settings):
        super().__init__(setup, settings)
        self.device_ = CohortEngine.last = Recorder()

        def new_lane(seat):
            return Workspace(setup, stepper=seat, built=self.server_workspace.parts, precision=self.precision)

        self.cohort = Cohort(settings.workers, new_lane, Replay, self.device_)
        self.device_.lanes = self.cohort.lanes

    def run(self, jobs):
        waiting = iter(jobs)
        while wave := list(islice(waiting, self.settings.workers)):
            yield from self.cohort.attempt(wave)


def updates(setup, clients, round=1):
    message = Message(Workspace(setup).downward())
    return [Job("update", round, message, client=client) for client in clients]


def close(got, expected, tolerance=1e-4):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def check(setup, cohort, jobs):
    """Every job's result is what a lane alone gives."""
    for got, job in zip(cohort.attempt(jobs), jobs, strict=True):
        assert got.error is None, got.error
        alone = perform(Workspace(setup), job)
        for mine, theirs in ((got.message, alone.message), (got.memory, alone.memory), (got.personal, alone.personal)):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                close(dict(mine), dict(theirs))


def same_run(got, expected):
    """Server, every client's score, every client's memory."""
    (mine, mine_kept), (theirs, theirs_kept) = got, expected
    close(mine.server.state, theirs.server.state)
    scores = [[(s.client, s.loss) for s in run.scores] for run in (mine, theirs)]
    assert [client for client, _ in scores[0]] == [client for client, _ in scores[1]]
    assert [loss for _, loss in scores[0]] == pytest.approx([loss for _, loss in scores[1]], rel=2e-3, abs=1e-4)
    assert mine_kept.keys() == theirs_kept.keys()
    for client, state in theirs_kept.items():
        close(mine_kept[client], state, 2e-4)
