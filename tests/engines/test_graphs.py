"""Captures, their memory, and what becomes of a lane when one breaks off."""

from types import SimpleNamespace

import pytest
import torch

from fedloom.engines.graphs import Pool, capture

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Graph:
    """Stands in for torch's: breaks where it is told to."""

    breaks: tuple[str, str] | None = None
    pools: list[object]

    def register_generator_state(self, generator):
        pass

    def capture_begin(self, pool, capture_error_mode):
        self.pools.append(pool)
        self._at("begin")

    def capture_end(self):
        self._at("end")

    def _at(self, place):
        if self.breaks and self.breaks[0] == place:
            raise RuntimeError(self.breaks[1])


@pytest.fixture
def graphs(monkeypatch):
    kind = type("Told", (Graph,), {"pools": []})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return kind


class Drawing:
    """A lane of which only the generator and the captures matter."""

    def __init__(self):
        self.generator = self.first = object()
        self.sites = {"fit": SimpleNamespace(captures={"a": "graph"})}

    def renew_generator(self):
        self.generator = object()


def nothing():
    pass


def test_graphs_share_memory_as_long_as_one_of_them_lives(graphs):
    pool = Pool()
    one, other = capture(nothing, [], pool), capture(nothing, [], pool)
    del one
    third = capture(nothing, [], pool)
    assert len(set(graphs.pools)) == 1
    del other, third
    capture(nothing, [], pool)
    assert len(set(graphs.pools)) == 2


@pytest.mark.parametrize("place", ["begin", "work", "end"])
def test_a_capture_that_breaks_off_anywhere_leaves_a_lane_that_can_draw(graphs, place):
    def work():
        if place == "work":
            raise RuntimeError("broken")

    graphs.breaks = (place, "broken")
    lane = Drawing()
    with pytest.raises(RuntimeError, match="broken"):
        capture(work, [lane], Pool())
    assert lane.generator is not lane.first
    assert not lane.sites["fit"].captures


def test_a_graph_for_which_there_is_no_memory_is_told_as_such(graphs):
    graphs.breaks = ("end", "CUDA error: out of memory\nSearch for …")
    with pytest.raises(torch.OutOfMemoryError):
        capture(nothing, [], Pool())


@needs_gpu
def test_after_the_last_graph_has_gone_another_is_captured():
    pool, x, made = Pool(), torch.zeros(3, device="cuda"), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            graph = capture(lambda: made.append(x + 1), [], pool)  # what is made keeps some of the memory
            graph.replay()
            del graph
    torch.cuda.synchronize()
    assert len(made) == 2
