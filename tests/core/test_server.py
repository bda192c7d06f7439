import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_run, tiny_task

from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.methods import get


@pytest.fixture
def server():
    setup = Setup(tiny_task(), get("fedavg"), Training(), seed=0)
    server = Server(Workspace(setup), federation=6)
    server.state.clear()
    return server


def test_the_average_is_weighted_by_samples(server):
    messages = [
        Message({"w": torch.tensor([1.0, 0.0])}, samples=3),
        Message({"w": torch.tensor([5.0, 4.0])}, samples=1),
    ]
    assert server.average(messages)["w"].tolist() == [2.0, 1.0]
    assert server.average(messages, by="uniform")["w"].tolist() == [3.0, 2.0]


def test_the_average_of_equal_values_is_that_value_bit_for_bit(server):
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mean = server.average(Message({"w": value}, samples=n) for n in (3, 7, 11, 13))
    assert torch.equal(mean["w"], value)


def test_integers_take_the_maximum_and_sums_add_up(server):
    messages = [
        Message({"n": torch.tensor(4), "counts": torch.tensor([1.0, 0.0])}, samples=1),
        Message({"n": torch.tensor(9), "counts": torch.tensor([2.0, 5.0])}, samples=1),
    ]
    mean = server.average(messages, sums=("counts",))
    assert mean["n"].item() == 9
    assert mean["counts"].tolist() == [3.0, 5.0]


def test_rows_weigh_by_their_counts_and_keep_the_old_value_where_nothing_was_sent(server):
    server.state["means"] = torch.tensor([[9.0, 9.0], [9.0, 9.0], [7.0, 8.0]])
    messages = [
        Message({"means": torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]), "counts": torch.tensor([1.0, 1.0, 0.0])}),
        Message({"means": torch.tensor([[4.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), "counts": torch.tensor([2.0, 0.0, 0.0])}),
    ]
    mean = server.average(messages, by={"means": "counts"}, sums=("counts",))
    assert mean["means"].tolist() == [[3.0, 1.0], [2.0, 2.0], [7.0, 8.0]]


def test_only_the_named_parts_are_averaged(server):
    messages = [Message({"a.w": torch.ones(1), "b.w": torch.ones(1)}, samples=1)]
    assert set(server.average(messages, "a")) == {"a.w"}


@pytest.mark.parametrize("clients", [4, 64])
def test_the_average_takes_one_pass_in_constant_memory(server, clients):
    made, most = [], 0

    def stream():
        nonlocal most
        for i in range(clients):
            message = Message({"w": torch.full((10,), float(i))}, samples=1)
            made.append(weakref.ref(message))
            most = max(most, sum(each() is not None for each in made))
            yield message

    assert np.isclose(server.average(stream())["w"][0].item(), (clients - 1) / 2)
    assert most <= 2  # the one that is added, and the one that is made


@pytest.mark.parametrize("method", ["fedavg", "fedcrl", "scaffold"])
def test_a_round_holds_as_many_messages_of_many_clients_as_of_few(method, monkeypatch):
    made, most = weakref.WeakSet(), []
    outgoing = Workspace.outgoing

    def watched(lane):
        sent = outgoing(lane)
        made.add(next(iter(sent.values())))
        most.append(len(made))
        return sent

    monkeypatch.setattr(Workspace, "outgoing", watched)
    positions = np.arange(4)
    task = replace(tiny_task(), federation=Federation([positions] * 40, [positions] * 40))
    for fraction in (0.1, 1.0):
        tiny_run(method, task=task, training__rounds=1, training__fraction=fraction)
    few, many = most[:4], most[4:]
    assert len(many) == 40
    assert max(many) == max(few) <= 3


def test_move_goes_part_of_the_way_per_part(server):
    server.state.update({"f.w": torch.zeros(2), "h.w": torch.zeros(2), "n": torch.tensor(1)})
    server.move({"f.w": torch.ones(2), "h.w": torch.ones(2), "n": torch.tensor(5)}, {"h": 0.25})
    assert server.state["f.w"].tolist() == [1.0, 1.0]
    assert server.state["h.w"].tolist() == [0.25, 0.25]
    assert server.state["n"].item() == 5


def test_sums_may_be_negative_or_whole_numbers_and_keep_the_old_value_where_nothing_was_sent(server):
    server.state.update({"d": torch.tensor([9.0, 9.0, 9.0]), "n": torch.tensor([5, 5])})
    messages = [
        Message({"d": torch.tensor([-1.0, 2.0, 0.0]), "n": torch.tensor([3, 0])}, samples=1),
        Message({"d": torch.tensor([-1.0, 2.0, 0.0]), "n": torch.tensor([4, 0])}, samples=1),
    ]
    summed = server.average(messages, sums=("d", "n"))
    assert summed["d"].tolist() == [-2.0, 4.0, 9.0]
    assert summed["n"].tolist() == [7, 5]


def test_a_mean_of_means_is_the_mean(server):
    rng = np.random.default_rng(0)
    messages = [Message({"w": torch.from_numpy(rng.normal(size=9)).float()}, samples=i % 7 + 1) for i in range(24)]
    groups = [messages[:5], messages[5:6], messages[6:]]
    edges = [Message(server.average(group), samples=sum(m.samples for m in group)) for group in groups]
    expected = np.average([m["w"].numpy() for m in messages], axis=0, weights=[m.samples for m in messages])
    np.testing.assert_allclose(server.average(edges)["w"].numpy(), expected, rtol=1e-5, atol=1e-7)
