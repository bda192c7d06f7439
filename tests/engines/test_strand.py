"""Strands: one stretch at a time, errors come out where it was resumed, and what is paused can be ended."""

from contextlib import contextmanager, nullcontext

import pytest

from fedloom.engines.strand import Strand


def test_it_runs_from_pause_to_pause_in_its_setting():
    told = []

    @contextmanager
    def setting():
        told.append("in")
        yield
        told.append("out")

    strand = Strand(setting)

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
    strand.close()
    assert told == ["in", 0, "between", 1, 2, "again", "out"]


def test_an_error_is_raised_where_it_was_resumed():
    strand = Strand(nullcontext)

    def work():
        strand.pause()
        raise ValueError("no more")

    assert strand.begin(work)
    with pytest.raises(ValueError, match="no more"):
        strand.resume()
    assert not strand.begin(lambda: None)
    strand.close()


def test_what_is_paused_can_be_ended_and_cleans_up():
    told = []
    strand = Strand(nullcontext)

    def work():
        try:
            strand.pause()
        finally:
            told.append("cleaned up")
        told.append("never")

    assert strand.begin(work)
    strand.cancel()
    strand.cancel()  # nothing to end any more
    assert told == ["cleaned up"]
    assert strand.begin(work)
    strand.close()
    assert told == ["cleaned up"] * 2


def test_what_cleaning_up_raises_is_nobodys_answer():
    told = []
    strand = Strand(nullcontext)

    def work():
        try:
            strand.pause()
        finally:
            raise ValueError("while cleaning up")

    def other():
        strand.pause()
        told.append("done")

    assert strand.begin(work)
    strand.cancel()
    assert strand.begin(other)
    assert not strand.resume()
    assert told == ["done"]
    strand.close()


def test_a_setting_that_cannot_be_is_told():
    @contextmanager
    def nowhere():
        raise RuntimeError("no device")
        yield

    strand = Strand(nowhere)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no device"):
            strand.begin(lambda: None)
    strand.close()
