"""Hostile clients: who they are, what they send, and that a robust rule undoes it."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from tiny import same_state, tiny_run, tiny_task, without_times

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.trust.attack import Attack, AttackSettings, FalsifyMessages, alie_strength


def attack(kind="signflip", clients=10, share=0.2, seed=0, **settings) -> Attack:
    return Attack(AttackSettings(kind=kind, share=share, **settings), range(clients), seed, by={"means": "counts"})


SENT = {"w": torch.tensor([3.0, 1.0]), "n": torch.tensor(4), "counts": torch.tensor([2.0]), "new": torch.tensor([5.0])}
GOT = Message({"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)})


@pytest.mark.parametrize(
    ("kind", "strength", "w", "new"),
    [
        ("signflip", None, [-1.0, 1.0], -5.0),
        ("signflip", 3.0, [-5.0, 1.0], -15.0),
        ("scale", None, [21.0, 1.0], 50.0),
        ("scale", 2.0, [5.0, 1.0], 10.0),
    ],
)
def test_the_update_is_what_is_changed_and_counts_and_integers_are_not(kind, strength, w, new):
    lie = attack(kind, strength=strength).falsified(Message(SENT, client=2, samples=9), GOT, 1)
    assert lie["w"].tolist() == w
    assert lie["new"].tolist() == [new]
    assert (lie["n"].item(), lie["counts"].tolist(), lie.client, lie.samples) == (4, [2.0], 2, 9)


def test_noise_has_the_strength_as_its_std_and_is_keyed():
    sent = Message({"w": torch.zeros(100_000)}, client=3)
    one, again = (attack("noise", strength=0.5).falsified(sent, GOT, 1)["w"] for _ in range(2))
    assert one.std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.equal(one, again)
    assert not torch.equal(one, attack("noise", strength=0.5).falsified(sent, GOT, 2)["w"])


def crowd(clients, hostile, seed=0):
    """Messages of clients with a row that some do not hold, and what they received."""
    rng = np.random.default_rng(seed)
    sent, got = {}, {}
    for c in range(clients):
        held = rng.integers(0, 2, 3) if c else np.array([1, 0, 1])
        held[2] = c in hostile  # a row that only hostile clients hold
        tensors = {
            "w": rng.normal(size=4), "means": rng.normal(size=(3, 2)) * held[:, None], "counts": 5.0 * held,
            "new": rng.normal(size=1),
        }  # fmt: skip
        sent[c] = Message({n: torch.from_numpy(v) for n, v in tensors.items()}, client=c, samples=c + 1)
        got[c] = Message({"w": torch.from_numpy(rng.normal(size=4)), "means": torch.ones(3, 2)})
    return {c: m for c, m in sent.items() if c in hostile}, {c: m for c, m in sent.items() if c not in hostile}, got


@pytest.mark.parametrize("strength", [None, 1.5])
def test_alie_sends_the_mean_minus_a_few_deviations_of_the_honest(strength):
    hostile, honest, got = crowd(9, (2, 5))
    lies = attack("alie", strength=strength).colluding(hostile, honest, got)
    z = norm.ppf((7 - (9 // 2 + 1 - 2)) / 7) if strength is None else strength
    values = np.stack([message["w"] for message in honest.values()])
    for client in (2, 5):
        assert np.allclose(lies[client]["w"], values.mean(0) - z * values.std(0), rtol=0, atol=1e-12)
        assert torch.equal(lies[client]["counts"], hostile[client]["counts"])
        assert (lies[client].client, lies[client].samples) == (client, client + 1)


@pytest.mark.parametrize("strength", [None, 3.0])
def test_ipm_sends_a_negative_multiple_of_the_mean_honest_update(strength):
    hostile, honest, got = crowd(9, (2, 5))
    lies = attack("ipm", strength=strength).colluding(hostile, honest, got)
    updates = np.stack([message["w"] - got[c]["w"] for c, message in honest.items()])
    new = np.mean([message["new"].item() for message in honest.values()])
    for client in (2, 5):
        expected = got[client]["w"].numpy() - (strength or 0.5) * updates.mean(0)
        assert np.allclose(lies[client]["w"], expected, rtol=0, atol=1e-12)
        assert lies[client]["new"].item() == pytest.approx(-(strength or 0.5) * new)


def test_colluding_clients_falsify_rows_by_those_that_hold_them():
    hostile, honest, got = crowd(9, (2, 5))
    lie = attack("alie", strength=2.0).colluding(hostile, honest, got)[2]
    for row in (0, 1):
        values = np.stack([m["means"][row].numpy() for m in honest.values() if m["counts"][row] > 0])
        assert np.allclose(lie["means"][row], values.mean(0) - 2 * values.std(0), rtol=0, atol=1e-12)
    assert torch.equal(lie["means"][2], hostile[2]["means"][2])  # no honest client holds it


def test_without_honest_clients_in_a_round_colluders_have_nothing_to_hide_among():
    hostile, _, got = crowd(3, (0, 1, 2))
    assert attack("alie").colluding(hostile, {}, got) == hostile


@pytest.mark.parametrize(
    ("clients", "hostile", "quantile"), [(25, 5, 12 / 20), (50, 12, 24 / 38), (20, 4, 9 / 16), (3, 1, 0.5)]
)
def test_the_default_strength_of_alie_is_that_of_algorithm_3(clients, hostile, quantile):
    assert alie_strength(clients, hostile) == pytest.approx(norm.ppf(quantile), abs=1e-9)


def test_the_default_strength_of_alie_is_bounded():
    assert alie_strength(10, 9) == pytest.approx(3.0)
    assert alie_strength(4, 1) == 0.0


@pytest.mark.parametrize("kind", ["alie", "ipm"])
def test_colluding_attacks_keep_the_order_of_results_and_engines_agree(kind):
    fields = {"attack": {"kind": kind, "share": 0.34}, "training__fraction": 1.0, "faults__nan": 0.2}
    one, other = (tiny_run("fedcrl", engine=e, **fields) for e in ("inline", "processes"))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
    assert any(record["failed"] for record in one.history)
    assert not same_state(one.server.state, tiny_run("fedcrl", **(fields | {"attack": None})).server.state)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "labelflip", "strength": 2}, "attack.strength = 2: the attack labelflip does not use it"),
        ({"kind": "alie", "portion": 0.5}, "attack.portion = 0.5: the attack alie does not use it"),
        ({"kind": "labelflip", "target": 1}, "attack.target = 1: .*only: backdoor"),
    ],
)
def test_a_field_that_the_attack_does_not_use_is_refused(section, words):
    with pytest.raises(UserError, match=words):
        Recipe.parse({"attack": section})


def test_only_attacks_on_messages_are_refused_with_compression():
    Recipe.parse({"attack": {"kind": "backdoor"}, "wire": {"up": "int8"}})
    with pytest.raises(UserError, match="falsifies uncompressed messages"):
        Recipe.parse({"attack": {"kind": "ipm"}, "wire": {"up": "int8"}})


def test_the_summary_names_the_hostile_clients():
    run = tiny_run("fedavg", attack={"share": 0.34}, training__rounds=1)
    named = ", ".join(map(str, sorted(run.trust.attack.hostile)))
    assert f"attack.kind = 'signflip': 2 hostile clients: {named}" in run.trust.notes


def test_the_hostile_are_a_share_of_the_clients_drawn_by_the_seed():
    assert len(attack(clients=20).hostile) == 4
    assert attack(clients=20).hostile == attack(clients=20, kind="noise").hostile
    assert attack(clients=20).hostile != attack(clients=20, seed=1).hostile


@pytest.mark.parametrize(("clients", "share"), [(2, 0.2), (2, 0.9)])
def test_a_share_that_makes_nobody_or_everybody_hostile_is_refused(clients, share):
    with pytest.raises(UserError, match=rf"attack\.share = {share}"):
        attack(clients=clients, share=share)


def test_the_record_counts_the_hostile_of_a_round_and_engines_agree():
    one, other = (tiny_run("fedavg", engine=e, attack={"share": 0.34}) for e in ("inline", "processes"))
    assert without_times(one.history) == without_times(other.history)
    assert same_state(one.server.state, other.server.state)
    hostile = one.trust.attack.hostile
    assert len(hostile) == 2
    assert [record["hostile"] for record in one.history] == [
        len(hostile & set(one.sampling.draw(r))) for r in (1, 2, 3)
    ]


def test_the_median_stays_among_the_honest_where_the_mean_does_not(monkeypatch):
    plain, sent = FalsifyMessages.run, {}

    def listening(middleware, jobs):
        for result in plain(middleware, jobs):
            sent[result.client] = result.message
            yield result

    monkeypatch.setattr(FalsifyMessages, "run", listening)
    shouting = {
        "attack": {"kind": "signflip", "share": 0.17, "strength": 1e4},
        "training__fraction": 1.0, "training__rounds": 1,
    }  # fmt: skip

    def share_outside(**fields):
        """Of all coordinates, how many left the range that honest clients span."""
        run = tiny_run("fedavg", task=tiny_task(norm=False), **shouting, **fields)
        (liar,) = run.trust.attack.hostile
        outside = []
        for name, value in run.server.state.items():
            honest = torch.stack([message[name] for client, message in sent.items() if client != liar])
            outside.append(((value < honest.amin(0)) | (value > honest.amax(0))).flatten())
        return torch.cat(outside).float().mean().item()

    assert share_outside() > 0.5
    assert share_outside(robust={"rule": "median"}) == 0
    assert share_outside(robust={"rule": "trimmed", "trim": 0.2}) == 0
