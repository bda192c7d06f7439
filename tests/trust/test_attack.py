"""Hostile clients: who they are, what they send, and that a robust rule undoes it."""

import pytest
import torch
from tiny import same_state, tiny_run, tiny_task, without_times

from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.trust.attack import Attack, AttackSettings, FalsifyMessages


def attack(kind="signflip", clients=10, share=0.2, seed=0, **settings) -> Attack:
    return Attack(AttackSettings(kind=kind, share=share, **settings), range(clients), seed, uncounted=("counts",))


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
