"""Notes: what a wave's results tell, row by row, wherever the ring of rows is."""

import torch

from fedloom.core.failures import Failure
from fedloom.core.job import Result
from fedloom.core.message import Message
from fedloom.engines.cuda.lanes import Notes


def result(client, value, loss=None):
    tensors = {"weight": torch.full((2, 3), value), "bias": torch.zeros(3), "count": torch.tensor(7)}
    return Result(client, message=Message(tensors), loss=loss)


def test_a_wave_that_goes_over_the_end_of_the_ring():
    notes = Notes(4, result(0, 1.0).message)
    wave = [
        result(0, 1.0, torch.tensor(0.5)),
        Result(1, error=Failure("raised", "no")),
        result(2, float("nan"), torch.tensor(1.5)),
        result(3, 2.0),  # took no step: it has no loss
    ]
    notes.write([2, 3, 4, 5], wave)
    for turn, one in zip([2, 3, 4, 5], wave, strict=True):
        notes.read(turn, one)
    assert [one.loss for one in wave] == [0.5, None, 1.5, None]
    assert [one.message and one.message.finite for one in wave] == [True, None, False, True]


def test_results_that_tell_nothing_leave_the_rows_alone():
    notes = Notes(2, result(0, 1.0).message)
    first = result(0, 1.0, torch.tensor(0.25))
    notes.write([0], [first])
    notes.write([1], [Result(1, error=Failure("raised", "no"))])
    notes.read(0, first)
    assert first.loss == 0.25


def test_double_precision_stays():
    wave = [Result(0, message=Message({"w": torch.tensor([1e300], dtype=torch.float64)}), loss=torch.tensor(0.1))]
    notes = Notes(3, wave[0].message)
    notes.write([1], wave)
    notes.read(1, wave[0])
    assert wave[0].message.finite
    assert abs(wave[0].loss - 0.1) < 1e-7
