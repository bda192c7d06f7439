"""Robust rules in the place of the mean: how weights, rows, sums and integers are treated, and what is refused."""

import numpy as np
import pytest
import torch
from tiny import same_state, tiny_run, tiny_task, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.server import Server, WeightedMean
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import METHODS as REGISTRY
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.trust.robust import RobustAverage, RobustSettings

RULES = [
    {"rule": "clip", "clip": 1.0},
    {"rule": "median"},
    {"rule": "trimmed", "trim": 0.2},
    {"rule": "krum", "attackers": 1},
    {"rule": "multikrum", "attackers": 1},
    {"rule": "geometric"},
    {"rule": "centred", "clip": 1.0, "momentum": 0.9},
    {"rule": "median", "bucket": 2},
]
AVERAGING = ["fedavg", "fedrep", "repper", "pfedme", "fedcrc", "fedcrl", "fedproto", "scaffold", "local"]


def server(expected: int = 5, **settings) -> Server:
    made = Server(
        Workspace(Setup(tiny_task(), get("fedavg"), Training(), seed=0)),
        federation=6,
        combination=RobustAverage(RobustSettings(**settings), get("fedavg"), expected),
    )
    made.state.clear()
    return made


def messages(values, samples=(1, 1, 1, 1, 1)):
    return [Message({"w": torch.tensor(v)}, client=i, samples=s) for i, (v, s) in enumerate(zip(values, samples))]  # noqa: B905


HONEST_AND_ONE_LIAR = [[1.0, 0.0], [1.1, 0.1], [0.9, 0.0], [1.0, 0.2], [-900.0, 900.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rule": "median"}, [1.0, 0.1]),
        ({"rule": "trimmed", "trim": 0.2}, [(1.0 + 1.0 + 0.9) / 3, 0.1]),
        ({"rule": "krum", "attackers": 1}, [1.0, 0.0]),
        ({"rule": "multikrum", "attackers": 1}, [1.0, 0.075]),
    ],
)
def test_a_liar_among_five_is_outvoted_whatever_its_claimed_samples(settings, expected):
    mean = server(**settings).average(messages(HONEST_AND_ONE_LIAR, samples=(1, 1, 1, 1, 10**9)))["w"]
    assert np.allclose(mean, expected, rtol=0, atol=1e-7)
    assert mean.dtype == torch.float32


def test_the_geometric_median_stays_with_the_honest():
    mean = server(rule="geometric").average(messages(HONEST_AND_ONE_LIAR))["w"]
    assert np.linalg.norm(mean.numpy() - [1.0, 0.1]) < 0.2


def test_clipping_bounds_each_update_around_the_old_state():
    made = server(rule="clip", clip=1.0)
    made.state["w"] = torch.tensor([10.0, 10.0])
    mean = made.average(messages([[10.3, 10.4], [13.0, 14.0]], samples=(1, 99)))["w"]
    assert np.allclose(mean, [10 + (0.3 + 0.6) / 2, 10 + (0.4 + 0.8) / 2], rtol=0, atol=1e-6)


def test_clipping_takes_all_tensors_of_an_update_jointly():
    made = server(rule="clip", clip=1.0)
    mean = made.average([Message({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, samples=1)])
    assert mean["a"].item() == pytest.approx(0.6)
    assert mean["b"].item() == pytest.approx(0.8)


def test_clipping_streams():
    alive = []

    class Watched(Message):
        def __del__(self):
            alive.remove(self.client)

    def stream():
        for i in range(20):
            alive.append(i)
            yield Watched({"w": torch.tensor([float(i)])}, client=i, samples=1)
            assert len(alive) <= 3

    assert server(rule="clip", clip=100.0).average(stream())["w"].item() == 9.5


def test_krum_takes_one_message_bit_for_bit():
    sent = [Message({"w": torch.randn(50, generator=torch.Generator().manual_seed(i))}, samples=7) for i in range(5)]
    mean = server(rule="krum", attackers=1).average(sent)["w"]
    assert sum(torch.equal(mean, message["w"]) for message in sent) == 1


@pytest.mark.parametrize("settings", RULES)
def test_equal_messages_are_their_own_centre(settings):
    value = torch.randn(100, generator=torch.Generator().manual_seed(0)) / 100
    mean = server(**settings).average(Message({"w": value}, client=i, samples=i + 1) for i in range(5))
    assert torch.equal(mean["w"], value)


def prototypes():
    """Row 0: three holders, one of them lying; row 1: one holder; row 2: nobody."""
    rows = [([5.0, 0, 0], [1.0, 0, 0]), ([6.0, 2.0, 0], [1.2, 3.0, 0]), ([10.0**9, 0, 0], [-800.0, 0, 0])]
    absent = [([0.0, 0, 0], [0.0, 0, 0])] * 2
    return [
        Message({"means": torch.tensor(means)[:, None], "counts": torch.tensor(counts)}, client=i, samples=1)
        for i, (counts, means) in enumerate(rows + absent)
    ]


@pytest.mark.parametrize(
    ("settings", "row", "holders"),
    [
        ({"rule": "median"}, 1.0, 3),
        ({"rule": "trimmed", "trim": 0.4}, 1.0, 3),
        ({"rule": "multikrum", "attackers": 1}, 1.1, 2),
    ],
)
def test_rows_are_combined_over_those_that_hold_them_and_count_holders(settings, row, holders):
    made = server(**settings)
    made.state["means"] = torch.tensor([[1.0], [1.0], [7.0]])
    got = made.average(prototypes(), by={"means": "counts"}, sums=("counts",))
    assert np.allclose(got["means"][:, 0], [row, 3.0, 7.0], rtol=0, atol=1e-6)
    assert (got["counts"] > 0).tolist() == [True, True, False]
    if settings["rule"] != "multikrum":
        assert got["counts"].tolist() == [holders, 1, 0]


def test_clipped_rows_move_by_the_bound_at_most():
    made = server(rule="clip", clip=2.0)
    made.state["means"] = torch.tensor([[1.0], [1.0], [7.0]])
    got = made.average(prototypes(), by={"means": "counts"}, sums=("counts",))
    step = 2.0 * 0.2 / (0.2**2 + 2**2) ** 0.5  # the second client's update is (0.2, 2): clipped to norm 2
    assert got["means"][0].item() == pytest.approx((1.0 + 1 + step + 1 - 2.0) / 3, abs=1e-6)
    assert got["means"][2].item() == 7.0
    assert got["counts"].tolist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("settings", "total"), [({"rule": "median"}, 5 * 2.0), ({"rule": "multikrum", "attackers": 1}, 5 * 2.0)]
)
def test_a_sum_is_the_number_of_clients_times_the_centre_of_the_addends(settings, total):
    sent = [Message({"change": torch.tensor([v])}, samples=1) for v in (1.0, 2.0, 3.0, 2.0, 1e6)]
    assert server(**settings).average(sent, sums=("change",))["change"].item() == pytest.approx(total)


def test_integers_take_the_median_of_a_coordinate_rule_and_the_chosen_ones_maximum_of_krum():
    sent = [Message({"w": torch.tensor([float(w)]), "n": torch.tensor(n)}, samples=1)
            for w, n in ((1, 3), (1, 4), (1, 5), (1, 5), (90, 10**12))]  # fmt: skip
    assert server(rule="median").average(sent)["n"].item() == 5
    assert server(rule="multikrum", attackers=1).average(sent)["n"].item() == 5


@pytest.mark.parametrize("settings", RULES)
def test_a_message_with_numbers_that_are_not_finite_is_left_out(settings):
    values = [0.5, 0.5, torch.nan, 0.5, 0.5, 0.5, torch.inf]
    sent = [Message({"w": torch.tensor([value])}, client=i, samples=1) for i, value in enumerate(values)]
    assert server(**settings).average(sent)["w"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("settings", "clients", "words"),
    [
        ({"rule": "krum", "attackers": 2}, 6, ["robust.attackers = 2", "needs 7 clients", "6 take part", "at most 1"]),
        ({"rule": "multikrum", "attackers": 0}, 2, ["needs 3 clients", "use more clients"]),
        ({"rule": "trimmed", "trim": 0.1}, 6, ["robust.trim = 0.1", "removes no value", "0.167"]),
    ],
)
def test_too_few_clients_are_refused_before_the_run(settings, clients, words):
    with pytest.raises(UserError) as refused:
        server(clients, **settings)
    assert [word for word in words if word not in str(refused.value)] == []


def test_too_few_usable_messages_are_refused_in_the_round():
    made = server(5, rule="krum", attackers=1)
    with pytest.raises(UserError, match=r"robust\.attackers = 1: krum needs 5 clients .* 3 sent a usable message"):
        made.average(messages([[1.0]] * 3))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"rule": "krum"}, ["robust.attackers is missing", "for example 4"]),
        ({"rule": "clip"}, ["robust.clip is missing"]),
        ({"rule": "median", "trim": 0.2}, ["robust.trim = 0.2", "does not use it", "remove it"]),
        ({"rule": "mean"}, ["robust.rule = 'mean'", "median"]),
        ({"rule": "trimmed", "trim": 0.5}, ["robust.trim = 0.5", "below 0.5"]),
        ({"rule": "median", "trimm": 0.5}, ["robust.trimm = 0.5", "did you mean 'trim'"]),
    ],
)
def test_a_mistake_in_the_section_names_field_value_and_remedy(section, words):
    with pytest.raises(UserError) as refused:
        Recipe.parse({"robust": section})
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize("method", ["fedamp", "fedgh", "fedpac", "centralized"])
def test_a_method_that_no_rule_would_protect_is_refused_before_anything_is_written(method, tmp_path):
    with pytest.raises(UserError, match=rf"method\.name = '{method}'"):
        tiny_run(method, robust={"rule": "median"}, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# Every method under two rules, every rule with three methods.
@pytest.mark.parametrize(
    ("method", "settings"),
    [(method, RULES[(i + j) % len(RULES)]) for i, method in enumerate(AVERAGING) for j in (0, 3)],
    ids=lambda value: value if isinstance(value, str) else value["rule"],
)
def test_averaging_methods_run_under_rules(method, settings):
    ran = tiny_run(method, robust=settings, training__fraction=1.0, training__rounds=2)
    assert all(torch.isfinite(value).all() for value in ran.server.state.values())


@pytest.mark.parametrize("settings", RULES, ids=lambda s: s["rule"])
def test_processes_equal_inline_bit_for_bit(settings):
    fields = {"robust": settings, "training__fraction": 1.0, "training__rounds": 2}
    one, other = (tiny_run("fedcrl", engine=e, **fields) for e in ("inline", "processes"))
    assert same_state(one.server.state, other.server.state)
    assert without_times(one.history) == without_times(other.history)


def test_without_the_sections_nothing_stands_between_messages_and_the_mean():
    run = tiny_run("fedavg")
    assert (run.trust.combination, run.trust.attack, run.trust.spending) == (None, None, None)
    messages = iter(())
    assert run.trust.restricted(messages) is messages
    assert run.history[0].keys().isdisjoint({"epsilon", "hostile"})


class Counting(FedAvg, abstract=True):
    """Asks the server for something before it averages, so that the rehearsal cannot know what comes then."""

    def combine(self, server, messages):
        assert server.federation == 6
        super().combine(server, messages)


class Peeking(Counting, abstract=True):
    """And then reads messages itself, around any rule."""

    def combine(self, server, messages):
        assert server.federation == 6
        mean = WeightedMean(server.state, None, {}, ())
        for message in messages:
            mean.add(message, 1.0)
        server.move(mean.result())


@pytest.mark.parametrize(
    "section", [{"robust": {"rule": "median"}}, {"privacy": {"noise": 0.1}}], ids=["rule", "private"]
)
def test_a_combine_that_cannot_be_rehearsed_is_told_of_and_cannot_go_around_the_rule(section, monkeypatch, caplog):
    for method in (Counting, Peeking):
        monkeypatch.setitem(REGISTRY, method.name, method)
    fields = section | {"training__fraction": 1.0, "training__rounds": 2}
    expected, got = tiny_run("fedavg", **fields), tiny_run("counting", **fields)
    assert same_state(got.server.state, expected.server.state)
    assert caplog.text.count("'counting' uses messages cannot be determined in advance") == 1
    with pytest.raises(UserError, match=r"method\.name = 'peeking' reads single clients' messages"):
        tiny_run("peeking", **fields)
