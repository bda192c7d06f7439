"""Client momentum and centred clipping against the paper's recursions in NumPy."""

import numpy as np
import pytest
import torch
from test_robust import server
from tiny import same_state, tiny_experiment, tiny_run, without_times

from fedloom.core.message import Message


def updates(rounds=4, clients=5, size=6, seed=0):
    return np.random.default_rng(seed).normal(size=(rounds, clients, size))


def run(made, each):
    """Send these updates [rounds, clients, size] around the server's state; return the state after each round."""
    made.state["w"] = torch.zeros(each.shape[-1], dtype=torch.float64)
    states = []
    for number, sent in enumerate(each, start=1):
        made.begin(number)
        old = made.state["w"]
        messages = [Message({"w": old + torch.from_numpy(u)}, client=c, samples=c + 1) for c, u in enumerate(sent)]
        made.move(made.average(messages))
        states.append(made.state["w"].numpy().copy())
    return states


def clipped(vector, radius):
    return vector * min(1, radius / np.linalg.norm(vector))


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_centred_clipping_with_momentum_is_that_of_the_paper(beta):
    """Karimireddy et al. (2021): m_i ← (1 − β) u_i + β m_i; v ← v + mean_i clip(m_i − v, τ); x ← x + v."""
    radius, each = 1.5, updates()
    found = run(server(rule="centred", clip=radius, momentum=beta), each)
    x, v, m = np.zeros(6), np.zeros(6), each[0]
    for number, sent in enumerate(each):
        m = sent if number == 0 else (1 - beta) * sent + beta * m
        v = v + np.mean([clipped(own - v, radius) for own in m], axis=0)
        x = x + v
        assert np.allclose(found[number], x, rtol=0, atol=1e-12)


def test_an_infinite_radius_gives_the_uniform_mean():
    each = updates()
    found = run(server(rule="centred", clip=float("inf")), each)
    assert np.allclose(found, np.cumsum(each.mean(1), axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{"rule": "median"}, {"rule": "clip", "clip": 1.0}, {"rule": "geometric"}])
def test_momentum_comes_before_any_rule(settings):
    each = updates()
    smooth = [each[0]]
    for sent in each[1:]:
        smooth.append(0.3 * sent + 0.7 * smooth[-1])
    expected = run(server(**settings), np.stack(smooth))
    assert np.allclose(run(server(**settings, momentum=0.7), each), expected, rtol=0, atol=1e-9)


def test_momentum_zero_leaves_nothing_in_memory_and_changes_nothing():
    plain, zero = (server(rule="median", **fields) for fields in ({}, {"momentum": 0.0}))
    assert np.array_equal(run(plain, updates()), run(zero, updates()))
    assert dict(zero.clients) == {}


def test_a_client_that_was_away_continues_with_its_last_momentum():
    made = server(rule="clip", clip=1e9, momentum=0.5)
    made.state["w"] = torch.zeros(1)
    for sent, expected in (({0: 8.0, 1: 4.0}, 6.0), ({0: 0.0}, 4.0), ({1: 2.0}, 3.0)):
        messages = [Message({"w": torch.tensor([u])}, client=c, samples=1) for c, u in sent.items()]
        assert made.average(messages)["w"].item() == expected


def test_rows_get_momentum_once_a_client_holds_them():
    made = server(rule="clip", clip=1e9, momentum=0.5)
    made.state["means"] = torch.zeros(2, 1)

    def combined(row_0, row_1, held_1):
        counts = torch.tensor([3.0, held_1])
        message = Message({"means": torch.tensor([[row_0], [row_1]]), "counts": counts}, client=0, samples=1)
        return made.average([message], by={"means": "counts"}, sums=("counts",))["means"][:, 0].tolist()

    assert combined(2.0, 0.0, 0.0) == [2.0, 0.0]
    assert combined(4.0, 6.0, 1.0) == [3.0, 6.0]  # the first update of row 1 is its momentum
    assert combined(3.0, 0.0, 0.0) == [3.0, 0.0]
    assert combined(3.0, 2.0, 1.0) == [3.0, 4.0]


@pytest.mark.parametrize("method", ["fedcrl", "scaffold"])
def test_engines_agree_and_a_resumed_run_remembers(method, tmp_path):
    fields = {"robust": {"rule": "centred", "clip": 1.0, "momentum": 0.9}}
    one, other = (tiny_run(method, engine=e, **fields) for e in ("inline", "processes"))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
    tiny_run(method, training__rounds=2, out=str(tmp_path / "run"), **fields)
    resumed = tiny_experiment(method, out=str(tmp_path / "run"), **fields)
    resumed.run(resume=True, extend=True)
    assert same_state(resumed.server.state, one.server.state)
