"""Coroutines: one stretch at a time, errors come out where it was resumed, and what is paused can be cancelled."""

import pytest
import torch

from fedloom.engines.recorded.coroutine import Coroutine


def test_it_runs_from_pause_to_pause():
    order, work = [], Coroutine()

    def counts():
        for number in range(3):
            order.append(number)
            work.pause()

    work.begin(counts)
    order.append("between")
    for _ in range(3):
        work.resume()
    work.begin(lambda: order.append("again"))
    assert order == [0, "between", 1, 2, "again"]


def test_everyone_has_a_gradient_mode_of_their_own():
    modes, work = [], Coroutine()

    def without_gradients():
        with torch.no_grad():
            work.pause()
            modes.append(torch.is_grad_enabled())
        work.pause()

    work.begin(without_gradients)
    modes.append(torch.is_grad_enabled())
    with torch.no_grad():
        work.resume()
        modes.append(torch.is_grad_enabled())
    assert modes == [True, False, False]


def test_an_error_is_raised_where_it_was_resumed():
    work = Coroutine()

    def fails():
        work.pause()
        raise ValueError("no more")

    work.begin(fails)
    with pytest.raises(ValueError, match="no more"):
        work.resume()
    done = []
    work.begin(lambda: done.append(1))
    assert done == [1]


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_paused_can_be_cancelled_and_cleans_up(raises):
    order, work = [], Coroutine()

    def cleans_up():
        try:
            work.pause()
        finally:
            order.append("cleaned up")
            if raises:
                raise ValueError("for which nobody waits any more")
        order.append("never")

    work.begin(cleans_up)
    work.cancel()
    work.cancel()  # nothing to cancel any more
    assert order == ["cleaned up"]
    work.begin(lambda: (work.pause(), order.append("done")))
    work.resume()
    assert order == ["cleaned up", "done"]


def test_work_that_pauses_while_it_is_cancelled_is_cancelled_again():
    order, work = [], Coroutine()

    def stubborn():
        try:
            work.pause()
        finally:
            work.pause()
            order.append("never")

    work.begin(stubborn)
    work.cancel()
    assert order == []


def test_cancelling_leaves_the_gradient_mode_of_the_caller():
    work = Coroutine()

    def switches_off():
        torch.set_grad_enabled(False)
        work.pause()

    work.begin(switches_off)
    work.cancel()
    assert torch.is_grad_enabled()


def test_a_pause_returns_to_whoever_resumed_it():
    order, inner, outer = [], Coroutine(), Coroutine()

    def begins():
        inner.begin(lambda: (inner.pause(), order.append("inner")))
        outer.pause()
        order.append("outer")

    outer.begin(begins)
    inner.resume()
    order.append("here")
    outer.resume()
    assert order == ["inner", "here", "outer"]
