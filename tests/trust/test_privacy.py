"""Differential privacy: the clipping bound, the measured noise, the accountant's own ε, and what is refused."""

import json
import sys

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from tiny import same_state, tiny_run, tiny_task, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import METHODS as REGISTRY
from fedloom.methods import get
from fedloom.methods.fedavg import FedAvg
from fedloom.trust.access import RestrictedMessages
from fedloom.trust.privacy import PrivacySettings, PrivateAverage, Spending, seeded_normals, system_normals, uncovered

SILENT = 1e-12
REFUSED = {
    "centralized", "fedamp", "fedas", "fedcrl", "feddyn", "fedgh", "fednova", "fedpac", "fedproto", "fedtgp",
    "scaffold",
}  # fmt: skip


def server(participants: float = 4, seed: int = 0, normals=None, **settings) -> Server:
    method = get("fedavg")
    private = PrivateAverage(PrivacySettings(**settings), method, participants, normals or seeded_normals(seed))
    made = Server(Workspace(Setup(tiny_task(), method, Training(), seed=0)), federation=6, combination=private)
    made.state.clear()
    made.begin(1)
    return made


def restricted(*states, samples=1) -> RestrictedMessages:
    messages = [Message(state, client=i, samples=samples) for i, state in enumerate(states)]
    return RestrictedMessages(iter(messages), "reads single clients' messages")


def test_without_noise_it_is_the_uniform_mean_of_clipped_updates_divided_by_the_number_meant_to_take_part():
    made = server(participants=4, clip=1.0, noise=SILENT)
    made.state.update({"model.a": torch.tensor([10.0]), "model.b": torch.tensor([0.0])})
    got = made.average(restricted(
        {"model.a": torch.tensor([10.3]), "model.b": torch.tensor([0.4])},  # norm 0.5: as it is
        {"model.a": torch.tensor([13.0]), "model.b": torch.tensor([4.0])},  # norm 5: to (0.6, 0.8)
        {"model.a": torch.tensor([torch.nan]), "model.b": torch.tensor([9.0])},  # nothing; and a fourth failed
        samples=1000,
    ))  # fmt: skip
    assert got["model.a"].item() == pytest.approx(10 + (0.3 + 0.6) / 4, abs=1e-6)
    assert got["model.b"].item() == pytest.approx((0.4 + 0.8) / 4, abs=1e-6)


def test_one_client_moves_the_sum_by_no_more_than_the_clip_whatever_it_sends():
    rng = np.random.default_rng(0)
    others = [{"model.w": torch.from_numpy(rng.normal(size=30)).float()} for _ in range(3)]
    for scale in (1e-3, 1.0, 1e6, 1e30):
        guest = {"model.w": torch.from_numpy(scale * rng.normal(size=30)).float()}
        results = []
        for crowd in (others, [*others, guest]):
            made = server(participants=1, clip=0.7, noise=0.9)  # the same noise in both: it is keyed
            made.state["model.w"] = torch.zeros(30, dtype=torch.float64)
            results.append(made.average(restricted(*crowd))["model.w"])
        assert (results[0] - results[1]).norm().item() <= 0.7 * (1 + 1e-9)


@pytest.mark.parametrize("normals", [seeded_normals(3), system_normals], ids=["seeded", "system"])
@pytest.mark.parametrize(("clip", "noise", "participants"), [(1.0, 1.0, 4), (0.5, 3.0, 10), (2.0, 0.7, 2.5)])
def test_the_noise_on_the_mean_has_the_std_noise_times_clip_over_participants(clip, noise, participants, normals):
    n = 200_000
    made = server(participants, normals=normals, clip=clip, noise=noise)
    made.state["model.w"] = torch.zeros(n)
    got = made.average(restricted({"model.w": torch.zeros(n)}))["model.w"]
    std = noise * clip / participants
    assert got.std().item() == pytest.approx(std, rel=0.01)  # its own standard error is 0.16 %
    assert abs(got.mean().item()) < 5 * std / n**0.5
    inside = (got.abs() < std).float().mean().item()
    assert inside == pytest.approx(0.6827, abs=0.005)  # a normal distribution


def test_noise_is_keyed_by_seed_and_round_and_differs_between_tensors():
    def noise(seed, round):
        made = server(seed=seed)
        made.state.update({"model.a": torch.zeros(50), "model.b": torch.zeros(50)})
        made.begin(round)
        return made.average(restricted())

    first = noise(0, 1)
    assert same_state(first, noise(0, 1))
    assert not torch.equal(first["model.a"], first["model.b"])
    assert not torch.equal(first["model.a"], noise(0, 2)["model.a"])
    assert not torch.equal(first["model.a"], noise(1, 1)["model.a"])


def test_integers_stay_as_they_were_and_a_noisy_variance_never_goes_negative():
    made = server(clip=1.0, noise=100.0)
    made.state.update({"model.n": torch.tensor(3), "model.running_var": torch.ones(1000)})
    sent = {"model.n": torch.tensor(99), "model.running_var": torch.full((1000,), 0.5)}
    got = made.average(restricted(sent))
    assert "model.n" not in got
    assert (got["model.running_var"] > 0).all()


@pytest.mark.parametrize(("sampling", "clients", "participants", "rounds"),
                         [("fixed", 100, 10, 30), ("fixed", 20, 20, 20), ("poisson", 100, 10, 30)])  # fmt: skip
def test_epsilon_is_the_accountants_own(sampling, clients, participants, rounds):
    settings = PrivacySettings(noise=1.3, delta=1e-6, sampling=sampling)
    fraction = participants / clients
    if sampling == "fixed":  # exchanging a client moves the sum by 2·clip: half the noise multiplier
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        event = dp_accounting.GaussianDpEvent(1.3 / 2)
        event = dp_accounting.SampledWithoutReplacementDpEvent(clients, participants, event)
    else:
        accountant = rdp.RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(fraction, dp_accounting.GaussianDpEvent(1.3))
    accountant.compose(event, rounds)
    got = Spending(settings, clients, fraction, participants).epsilon(rounds)
    assert got == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)


def test_sampling_is_never_reckoned_worse_than_no_sampling():
    settings = PrivacySettings(noise=1.0)
    everybody = Spending(settings, 20, 1.0, 20).epsilon(20)
    assert Spending(settings, 20, 0.6, 12).epsilon(20) <= everybody
    assert Spending(settings, 2000, 0.01, 20).epsilon(20) < everybody / 3


def test_epsilon_is_in_every_record_and_the_summary(tmp_path):
    run = tiny_run("fedavg", privacy={"noise": 2.0}, out=str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [Spending(PrivacySettings(noise=2.0), 6, 0.6, 4).epsilon(r) for r in (1, 2, 3)]
    assert [line["epsilon"] for line in lines] == expected
    assert expected == sorted(set(expected))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] == expected[-1]
    assert run.history[0]["clients"] == 4


def test_engines_agree_and_local_spends_nothing():
    one, other = (tiny_run("fedrep", engine=e, privacy={}) for e in ("inline", "processes"))
    assert same_state(one.server.state, other.server.state)
    assert without_times(one.history) == without_times(other.history)
    assert [record["epsilon"] for record in tiny_run("local", privacy={}).history] == [0.0] * 3


def test_poisson_sampling_lets_each_client_join_by_itself_perhaps_nobody():
    run = tiny_run("fedavg", privacy={"sampling": "poisson"}, training__fraction=0.2, training__rounds=12)
    counts = [record["clients"] for record in run.history]
    assert 0 in counts and max(counts) > 1
    assert run.trust.combination.participants == pytest.approx(1.2)
    empty = run.history[counts.index(0)]
    assert empty["up_bytes"] == 0 and empty["loss"] is None
    drawn = [len(run.sampling.draw(r)) for r in range(1, 3001)]
    assert np.mean(drawn) == pytest.approx(1.2, abs=0.1)  # 6 × 0.2, standard error 0.018


def test_an_empty_round_releases_noise_all_the_same():
    made = server()
    made.state["model.w"] = torch.zeros(100)
    assert made.average(restricted())["model.w"].std() > 0


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_a_method_is_covered_or_refused_before_anything_is_written(method, tmp_path):
    fields = {"privacy": {}, "training__rounds": 1, "out": str(tmp_path / "run")}
    if method in REFUSED:
        assert uncovered(get(method)) is not None
        with pytest.raises(UserError, match=rf"privacy: method\.name = '{method}'"):
            tiny_run(method, **fields)
        assert not (tmp_path / "run").exists()
    else:
        assert all(torch.isfinite(v).all() for v in tiny_run(method, **fields).server.state.values())


class Peeking(FedAvg, abstract=True):
    """Asks the server for something first, then reads a message: the rehearsal cannot know."""

    def combine(self, server, messages):
        assert server.state
        for message in messages:
            server.state.update(message)


class Twice(FedAvg, abstract=True):
    def combine(self, server, messages):
        server.average(messages)
        server.average(messages)


def test_messages_are_hidden_from_a_method_that_reads_them_and_a_second_average_is_refused():
    made = server()
    made.state["model.w"] = torch.zeros(1)
    with pytest.raises(UserError, match="reads single clients' messages"):
        Peeking().combine(made, restricted({"model.w": torch.ones(1)}))
    with pytest.raises(UserError, match="averages twice in a round"):
        Twice().combine(made, restricted({"model.w": torch.ones(1)}))
    with pytest.raises(UserError, match="reads single clients' messages"):
        made.average(iter([Message({"model.w": torch.ones(1)})]))


def test_privacy_and_a_robust_rule_are_refused_together():
    with pytest.raises(UserError, match=r"robust\.rule = 'median': cannot be combined with privacy"):
        Recipe.parse({"robust": {"rule": "median"}, "privacy": {}})


@pytest.mark.parametrize(("field", "value"), [("clip", 0), ("noise", -1.0), ("delta", 1.0), ("sampling", "uniform")])
def test_a_mistake_in_the_section_names_the_field_and_the_value(field, value):
    with pytest.raises(UserError, match=rf"privacy\.{field} = {value!r}"):
        Recipe.parse({"privacy": {field: value}})


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'fedloom\[privacy\]'"):
        Spending(PrivacySettings(), 10, 1.0, 10)


def test_parts_that_the_server_does_not_hold_have_no_old_value_to_add_noise_to():
    assert uncovered(get("fedper")) is None
    assert "does not hold" in uncovered(get("fedper", average_heads=True))
    assert "does not hold" in uncovered(get("fednova"))
