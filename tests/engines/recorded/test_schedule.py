"""A cohort's schedule: every client takes all its own steps, in its own order, together with others where it can."""

import numpy as np
import pytest
import torch

from fedloom.core.batches import draw, shuffled
from fedloom.engines.recorded.schedule import SPARSE, Remaining, pieces


def plans(sizes, *, size=16, epochs=1, batches=1):
    return [shuffled(1000 * i + np.arange(n), size, i, epochs=epochs, batches=batches) for i, n in enumerate(sizes)]


def all_pieces(given, rows=2, take=lambda row, steps: None):
    """The schedule to its end, when nobody else joins."""
    left = {row: Remaining(plan) for row, plan in enumerate(given)}
    while waiting := {row: remaining for row, remaining in left.items() if remaining}:
        for piece in pieces(waiting, rows):
            yield piece
            for row in piece.clients:
                assert left[row].size == piece.size
                take(row, left[row].take(piece.count))


def order(given, rows=2):
    return [(list(p.clients), p.size, p.count) for p in all_pieces(given, rows)]


UNEVEN = [
    (70, 66, 40, 9),
    (64, 64, 64),
    (9, 70, 33),
    (5,),
    (33, 32, 17, 1),
    (7, 7, 7),
    (16, 0, 40),
    (0, 16),
    (90, 1, 90),
]


@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("sizes", UNEVEN)
def test_every_client_takes_its_own_steps_in_order(sizes, epochs, batches, rows):
    given = plans(sizes, epochs=epochs, batches=batches)
    taken = [[] for _ in given]
    for piece in all_pieces(given, rows, lambda row, steps: taken[row].extend(torch.from_numpy(steps))):
        assert rows == 2 or len(piece.clients) == 1
    for plan, steps in zip(given, taken, strict=True):
        expected = list(plan.steps(torch.device("cpu")))
        assert [len(row) for row in steps] == [len(row) for row in expected]
        assert all(torch.equal(want, got) for want, got in zip(expected, steps, strict=True))


def test_even_clients_are_together_all_the_way():
    assert order(plans((40, 40, 40))) == [([0, 1, 2], 16, 2), ([0, 1, 2], 8, 1)]


def test_the_small_drop_out_one_after_another():
    assert order(plans((64, 48, 32, 16))) == [([0, 1, 2, 3], 16, 1), ([0, 1, 2], 16, 1), ([0, 1], 16, 1), ([0], 16, 1)]


def test_remainders_are_taken_alone_and_then_all_go_on_together():
    one = [([0, 1], 16, 2), ([0], 8, 1), ([1], 4, 1)]
    assert order(plans((40, 36), epochs=2)) == 2 * one


def test_few_clients_of_many_rows_are_taken_alone():
    given = plans((64, 48))
    assert order(given, rows=2 * SPARSE)[0] == ([0, 1], 16, 3)
    assert order(given, rows=2 * SPARSE + 1) == [([0], 16, 4), ([1], 16, 3)]


def test_steps_that_are_dropped_are_not_taken():
    left = Remaining(*plans((40,)))
    assert (left.size, left.count) == (16, 2)
    left.take(1)
    assert (left.size, left.count) == (16, 1)
    left.clear()
    assert not left


def test_plans_drawn_together_are_those_drawn_alone():
    sizes = (40, 36, 40, 0, 40)
    together, alone = (plans(sizes, epochs=2, batches=2) for _ in range(2))
    draw(together)
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.index, other.index)
        assert np.array_equal(one.keys, other.keys)
        assert one.index.shape == (2, one.samples // 2)
    assert len({tuple(plan.index[0] % 1000) for plan in together if plan.samples == 160}) == 3
    assert not np.array_equal(together[0].index[0], together[0].index[1])
