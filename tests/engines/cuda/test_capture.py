"""Captures, their memory, and what becomes of a lane when one breaks off."""

from types import SimpleNamespace

import pytest
import torch

from fedloom.engines.cuda.capture import GraphMemory, capture

needs_gpu = pytest.mark.cuda


class Graph:
    """Stands in for torch's: breaks where it is told to."""

    breaks: tuple[str, ...] = ()
    error = "broken"
    pools: list[object]
    ended: list[object]

    def register_generator_state(self, generator):
        pass

    def capture_begin(self, pool, capture_error_mode):
        self.pools.append(pool)
        self._at("begin")

    def capture_end(self):
        self._at("end")

    def _at(self, place):
        if place in self.breaks:
            raise RuntimeError(self.error)


@pytest.fixture
def graphs(monkeypatch):
    kind = type("FitResult", (Graph,), {"pools": [], "ended": []})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: kind.ended.append(pool), raising=False)
    return kind


class Drawing:
    """A lane of which only the generator and the captures matter."""

    def __init__(self):
        self.generator = self.first = object()
        self.caches = {"fit": SimpleNamespace(captures={"a": "graph"})}

    def renew_generator(self):
        self.generator = object()


def nothing():
    pass


def test_graphs_share_memory_as_long_as_one_of_them_lives(graphs):
    pool = GraphMemory()
    one, other = capture(nothing, [], pool), capture(nothing, [], pool)
    del one
    third = capture(nothing, [], pool)
    assert len(set(graphs.pools)) == 1
    del other, third
    capture(nothing, [], pool)
    assert len(set(graphs.pools)) == 2


@pytest.mark.parametrize("places", [("begin",), ("work",), ("end",), ("work", "end")])
def test_a_capture_that_breaks_off_anywhere_leaves_a_lane_that_can_draw(graphs, places):
    def work():
        if "work" in places:
            raise RuntimeError("broken work")

    graphs.breaks = places
    lane = Drawing()
    with pytest.raises(RuntimeError, match="broken work" if "work" in places else "broken"):
        capture(work, [lane], GraphMemory())
    assert lane.generator is not lane.first
    assert not lane.caches["fit"].captures


def test_where_a_capture_broke_off_none_is_tried_again(graphs):
    pool = GraphMemory()
    living = capture(nothing, [], pool)
    graphs.breaks = ("end",)
    with pytest.raises(RuntimeError, match="broken"):
        capture(nothing, [], pool)
    graphs.breaks = ()
    after = [capture(nothing, [], pool), capture(nothing, [], pool)]
    first, spoilt, *others = graphs.pools
    assert first is spoilt
    assert graphs.ended == [spoilt]
    assert others[0] is others[1] is not spoilt
    del living, after  # whose lives mattered


def test_a_graph_for_which_there_is_no_memory_is_told_as_such_and_holds_none(graphs):
    graphs.breaks, graphs.error = ("end",), "CUDA error: out of memory\nSearch for …"
    with pytest.raises(torch.OutOfMemoryError) as told:
        capture(nothing, [], GraphMemory())
    assert told.value.__cause__ is told.value.__context__ is None


@needs_gpu
def test_after_the_last_graph_has_gone_another_is_captured():
    pool, x, made = GraphMemory(), torch.zeros(3, device="cuda"), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            graph = capture(lambda: made.append(x + 1), [], pool)  # what is made keeps some of the memory
            graph.replay()
            del graph
    torch.cuda.synchronize()
    assert len(made) == 2
