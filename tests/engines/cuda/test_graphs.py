"""Captures and their memory, what a capture that fails leaves behind, and the feed of rows."""

import numpy as np
import pytest
import torch

from fedloom.engines.cuda.graphs import Graphs
from fedloom.engines.recorded.checks import restored
from fedloom.engines.recorded.recorder import Feed


class Graph:
    """A fake CUDAGraph that fails at a chosen call."""

    fails: tuple[str, ...] = ()
    error = "broken"
    pools: list[object]
    ended: list[object]

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        self._at("begin")

    def capture_end(self):
        self._at("end")

    def replay(self):
        pass

    def _at(self, place):
        if place in self.fails:
            raise RuntimeError(self.error)


class Stream:
    waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def kind(monkeypatch):
    kind = type("Fake", (Graph,), {"pools": [], "ended": []})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: kind.ended.append(pool), raising=False)
    return kind


def nothing():
    pass


def test_graphs_share_memory_as_long_as_one_of_them_lives(kind):
    graphs = Graphs(Stream())
    one, other = graphs.capture(nothing), graphs.capture(nothing)
    del one
    third = graphs.capture(nothing)
    assert len(set(kind.pools)) == 1
    del other, third
    graphs.capture(nothing)
    assert len(set(kind.pools)) == 2


@pytest.mark.parametrize("places", [("begin",), ("work",), ("end",), ("work", "end")])
def test_the_first_error_of_a_capture_is_raised_and_its_pool_left(kind, places):
    def work():
        if "work" in places:
            raise RuntimeError("broken work")

    kind.fails = places
    with pytest.raises(RuntimeError, match="broken work" if "work" in places else "broken"):
        Graphs(Stream()).capture(work)
    assert kind.ended == kind.pools


def test_a_pool_in_which_a_capture_failed_is_not_used_again(kind):
    graphs = Graphs(Stream())
    living = graphs.capture(nothing)
    kind.fails = ("end",)
    with pytest.raises(RuntimeError, match="broken"):
        graphs.capture(nothing)
    kind.fails = ()
    after = [graphs.capture(nothing), graphs.capture(nothing)]
    first, broken, *others = kind.pools
    assert first is broken
    assert kind.ended == [broken]
    assert others[0] is others[1] is not broken
    del living, after  # whose lives mattered


@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_graph_for_which_there_is_no_memory_holds_none(kind, place):
    kind.fails, kind.error = (place,), "CUDA error: out of memory\nSearch for …"
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Graphs(Stream()).capture(nothing)
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_work_that_runs_out_of_memory_raises_that(kind):
    def work():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Graphs(Stream()).capture(work)
    assert kind.ended == kind.pools


def test_settling_waits_for_the_stream():
    stream = Stream()
    Graphs(stream).settle()
    assert stream.waits == 1


@pytest.mark.cuda
def test_after_the_last_graph_is_gone_another_is_captured():
    x, made = torch.zeros(3, device="cuda"), []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = Graphs(stream)
        for _ in range(2):
            replay = graphs.capture(lambda: made.append(x + 1))  # what is made keeps some of the memory
            replay()
            del replay
    torch.cuda.synchronize()
    assert len(made) == 2


@pytest.mark.cuda
def test_a_graph_is_replayed_and_a_failed_capture_leaves_a_stream_that_works():
    x = torch.zeros(3, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = Graphs(stream)
        x.add_(1)
        add = graphs.capture(lambda: x.add_(1))
        with pytest.raises(RuntimeError):
            graphs.capture(lambda: x.sum().item())
        again = graphs.capture(lambda: x.mul_(2))
        add()
        again()
        graphs.settle()
        assert x.tolist() == [4.0] * 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_rows_come_out_as_they_went_in(device):
    feed = Feed(100, torch.device(device))
    first, second = np.arange(12).reshape(2, 2, 3), 100 + np.arange(10).reshape(5, 2)
    for start in (0, 7):  # a second filling begins at the first value again
        feed.fill([first + start, second + start])
        assert feed.take(2, 2, 3).tolist() == (first + start).tolist()
        assert feed.take(1, 2).tolist() == (second[:1] + start).tolist()
        assert feed.take(4, 2).tolist() == (second[1:] + start).tolist()


def test_a_feed_has_room_for_its_capacity():
    feed = Feed(6, torch.device("cpu"))
    feed.fill([np.arange(6)])
    assert feed.take(6).tolist() == list(range(6))
    with pytest.raises(RuntimeError):
        feed.fill([np.arange(7)])


def test_keys_of_64_bits_go_through():
    feed = Feed(2, torch.device("cpu"))
    keys = np.array([-(2**63), 2**63 - 1])
    feed.fill([keys])
    assert feed.take(2).tolist() == keys.tolist()


def test_what_is_taken_on_trial_can_be_taken_again():
    feed = Feed(10, torch.device("cpu"))
    feed.fill([np.arange(10)])
    feed.take(2)
    with restored([feed.position]):
        assert feed.take(3).tolist() == [2, 3, 4]
    assert feed.take(3).tolist() == [2, 3, 4]


@pytest.mark.cuda
def test_a_captured_take_reads_the_next_rows_each_time():
    feed, seen = Feed(10, torch.device("cuda")), torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        feed.fill([np.arange(10)])
        with restored([feed.position]):
            seen.copy_(feed.take(2))
        with restored([feed.position]):
            replay = Graphs(stream).capture(lambda: seen.copy_(feed.take(2)))
        for start in (0, 2, 4):
            replay()
            assert seen.tolist() == [start, start + 1]
        feed.fill([np.arange(50, 60)])
        replay()
        assert seen.tolist() == [50, 51]
