"""In step, every lane takes all its own steps, in its own order."""

import numpy as np
import pytest
import torch

from fedloom.core.batches import Plan, shuffled
from fedloom.engines.cuda.together import pieces, samples


def plans(sizes, *, size=16, epochs=1, batches=1):
    return [shuffled(1000 * i + np.arange(n), size, np.random.default_rng(i), epochs=epochs, batches=batches)
            for i, n in enumerate(sizes)]  # fmt: skip


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("sizes", [(70, 66, 40, 9), (64, 64, 64), (9, 70, 33), (5,), (33, 32, 17, 1), (7, 7, 7)])
def test_every_lane_takes_its_own_steps_in_order(sizes, epochs, batches):
    given = plans(sizes, epochs=epochs, batches=batches)
    taken = [[] for _ in given]
    for piece in pieces(given):
        for step in samples(given, piece):
            for lane, rows in zip(piece.lanes, step, strict=True):
                taken[lane].append(torch.from_numpy(rows.copy()))
    for plan, steps in zip(given, taken, strict=True):
        expected = list(plan.steps(torch.device("cpu")))
        assert [tuple(map(len, step)) for step in steps] == [tuple(map(len, step)) for step in expected]
        assert all(torch.equal(torch.stack(want), got) for want, got in zip(expected, steps, strict=True))


def test_even_clients_are_in_step_all_the_way():
    assert [(len(p.lanes), p.size, p.count) for p in pieces(plans((40, 40, 40)))] == [(3, 16, 2), (3, 8, 1)]


def test_the_small_fall_out_of_step_one_after_another():
    order = [(len(p.lanes), p.size, p.count) for p in pieces(plans((64, 48, 32, 16)))]
    assert order == [(4, 16, 1), (3, 16, 1), (2, 16, 1), (1, 16, 1)]


def test_remainders_are_taken_alone_and_then_all_go_on_together():
    order = [(len(p.lanes), p.size, p.count) for p in pieces(plans((40, 36), epochs=2))]
    assert order == [(2, 16, 2), (1, 8, 1), (1, 4, 1), (2, 16, 2), (1, 8, 1), (1, 4, 1)]


def test_nothing_to_do_is_no_piece():
    assert pieces([Plan(torch.empty(1, 0, dtype=torch.int64), [])]) == []
