"""Lanes and cohorts on a CPU, with a recorder that counts."""

from itertools import groupby

import pytest
import torch

from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine
from fedloom.engines.recorded.cohort import Cohort
from fedloom.engines.recorded.lane import Lane, Shared
from fedloom.engines.recorded.tape import Tapes


class Recorder(Tapes):
    """Records on a CPU; counts recordings and replays."""

    def __init__(self, error=None):
        super().__init__()
        self.recorded = self.replays = 0
        self.error = error

    def capture(self, work):
        if self.error is not None:
            raise self.error
        replay = super().capture(work)
        self.recorded += 1

        def counted():
            self.replays += 1
            replay()

        return counted


def lane_of(
    setup: Setup, slots: int = 1, recorder: Recorder | None = None, workspace: dict | None = None, **shared
) -> Lane:
    """A lane of one client at a time, or a cohort of several."""

    def new_workspace(**options):
        return Workspace(setup, **options, **(workspace or {}))

    parts = (new_workspace, recorder or Recorder(), Shared(**shared))
    return Lane(*parts) if slots == 1 else Cohort(slots, *parts)


class LaneEngine(Engine):
    """A lane as an engine: of one client at a time, or with `workers` above one a cohort."""

    name = "lane-for-tests"
    recorder: Recorder
    """Of the last engine that was made."""

    def __init__(self, setup, settings):
        super().__init__(setup, settings)
        LaneEngine.recorder = Recorder()
        options = {"built": self.server_workspace.parts, "precision": self.precision}
        self.lane = lane_of(setup, settings.workers, LaneEngine.recorder, options)

    def run(self, jobs):
        for _, alike in groupby(jobs, lambda job: job.kind):
            yield from (result.read() for result in self.lane.launch(list(alike)))


def alternately(methods: list[str], first: int) -> list:
    """Every third method for `make test`, the others for `make slow`."""
    return [m if i % 3 == first else pytest.param(m, marks=pytest.mark.slow) for i, m in enumerate(methods)]


def updates(setup, clients, round=1):
    message = Message(Workspace(setup).downward())
    return [Job("update", round, message, client=client) for client in clients]


def close(got, expected, tolerance=1e-4):
    got, expected = dict(got), dict(expected)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def check(setup, lane, jobs):
    """Every job's result is what a workspace alone gives."""
    for got, job in zip(lane.launch(jobs), jobs, strict=True):
        assert got.error is None, got.error
        alone = perform(Workspace(setup), job)
        got.read()
        assert got.client == alone.client
        for mine, theirs in ((got.message, alone.message), (got.memory, alone.memory), (got.personal, alone.personal)):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                close(mine, theirs)
        assert got.loss == (None if alone.loss is None else pytest.approx(alone.loss, rel=1e-3, abs=1e-4))
        assert [s.right for s in got.scores] == [s.right for s in alone.scores]


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
