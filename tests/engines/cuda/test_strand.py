"""Strands: one stretch at a time, errors come out where it was resumed, and what is paused can be ended."""

import pytest
import torch

from fedloom.engines.cuda.cohort import Strand


def test_it_runs_from_pause_to_pause():
    told, strand = [], Strand()

    def work():
        for number in range(3):
            told.append(number)
            strand.pause()

    assert strand.begin(work)
    told.append("between")
    assert strand.resume()
    assert strand.resume()
    assert not strand.resume()
    assert not strand.begin(lambda: told.append("again"))
    assert told == [0, "between", 1, 2, "again"]


def test_whether_gradients_are_recorded_is_everybodys_own():
    modes, strand = [], Strand()

    def work():
        with torch.no_grad():
            strand.pause()
            modes.append(torch.is_grad_enabled())
        strand.pause()

    strand.begin(work)
    modes.append(torch.is_grad_enabled())
    with torch.no_grad():
        strand.resume()
        modes.append(torch.is_grad_enabled())
    assert modes == [True, False, False]


def test_an_error_is_raised_where_it_was_resumed():
    strand = Strand()

    def work():
        strand.pause()
        raise ValueError("no more")

    assert strand.begin(work)
    with pytest.raises(ValueError, match="no more"):
        strand.resume()
    assert not strand.begin(lambda: None)


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_paused_can_be_ended_and_cleans_up(raises):
    told, strand = [], Strand()

    def work():
        try:
            strand.pause()
        finally:
            told.append("cleaned up")
            if raises:
                raise ValueError("which is nobody's answer any more")
        told.append("never")

    assert strand.begin(work)
    strand.cancel()
    strand.cancel()  # nothing to end any more
    assert told == ["cleaned up"]
    assert strand.begin(lambda: (strand.pause(), told.append("done")))
    assert not strand.resume()
    assert told == ["cleaned up", "done"]


def test_ending_leaves_the_mode_of_whoever_ends_it():
    strand = Strand()

    def work():
        torch.set_grad_enabled(False)
        strand.pause()

    strand.begin(work)
    strand.cancel()
    assert torch.is_grad_enabled()


def test_a_pause_goes_back_to_whoever_resumed_it():
    told, inner, outer = [], Strand(), Strand()

    def begins():
        inner.begin(lambda: (inner.pause(), told.append("inner")))
        outer.pause()
        told.append("outer")

    outer.begin(begins)
    inner.resume()
    told.append("here")
    outer.resume()
    assert told == ["inner", "here", "outer"]
