"""Ditto: the global half is FedAvg; the personal model is held near what was received, and stays."""

import pytest
import torch
from by_hand import ByHand, Fixed, parameters, perturb, unlabelled
from references import reference
from tiny import same_state, tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.methods import get, hyperparameters, method_class

pytestmark = pytest.mark.full


def test_the_global_half_is_fedavg_bit_for_bit():
    ditto, fedavg = tiny_run("ditto"), tiny_run("fedavg")
    assert same_state(ditto.server.state, fedavg.server.state)
    assert [r["global_accuracy"] for r in ditto.history] == [r["global_accuracy"] for r in fedavg.history]
    assert [s.loss for s in ditto.scores] != [s.loss for s in fedavg.scores]


@pytest.mark.parametrize("towards", ["received", "optimised"])
def test_the_personal_loss_pulls_towards_the_right_model_with_gradient(towards):
    run = ByHand(get("ditto", lam=3.0, towards=towards))
    client = run.at_work(0)
    for seed, part in enumerate((client.personal, client.model, client.received.model)):
        perturb(part, seed=seed)
    client.personal.requires_grad_(True)
    batch, anchor = Fixed(), client.received.model if towards == "received" else client.model
    loss = run.method.personal_loss(client, batch)
    distance = sum(
        (v - w).detach().double().square().sum()
        for v, w in zip(client.personal.parameters(), anchor.parameters(), strict=True)
    )
    plain = cross_entropy(client.personal(batch.x), batch.y)
    assert loss.item() == pytest.approx(plain.item() + 1.5 * distance.item(), rel=1e-5)
    got, bare = (torch.autograd.grad(f, client.personal.head.weight)[0] for f in (loss, plain))
    torch.testing.assert_close(got, bare + 3.0 * (client.personal.head.weight - anchor.head.weight))


def test_the_anchor_is_the_received_model_and_not_the_one_just_trained():
    run = ByHand(get("ditto", lam=20.0), epochs=10, optimizer={"lr": 0.02})
    start = {name: value.clone() for name, value in run.server.state.items()}
    sent = run.round([0])[0]

    def away(reference):
        personal = run.memories[0]
        return sum((personal["personal" + n[5:]] - reference[n]).square().sum().item() for n in start)

    assert away(start) < 0.2 * away(sent)


def test_without_pull_the_personal_model_is_trained_alone():
    free, held = ByHand(get("ditto", lam=0.0), epochs=5), ByHand(get("ditto", lam=5.0), epochs=5)
    free.round()
    held.round()
    initial = parameters(free.lane.setup.build())

    def moved(run):
        return sum((run.memories[0][n] - p).square().sum() for n, p in initial.items() if n.startswith("personal"))

    assert moved(held) < 0.5 * moved(free)


def test_the_personal_model_is_kept_and_never_overwritten_by_the_global_one():
    run = ByHand(get("ditto"))
    run.round()
    before = {name: value.clone() for name, value in run.memories[0].items()}
    run.round([1, 2])
    assert same_state(run.memories[0], before)
    client = run.personal(0)
    x = Fixed().x
    assert same_state({f"personal.{n}": p for n, p in parameters(client.personal).items()}, before)
    assert torch.equal(run.method.predict(client, x), client.personal(x))
    assert not torch.allclose(client.personal(x), client.model(x))


def test_no_default_switches_it_off():
    assert hyperparameters(method_class("ditto"))["lam"] > 0


def test_batch_norm_statistics_of_both_models():
    run = ByHand(get("ditto"), tiny_task(norm=True))
    run.round()
    assert run.server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
    assert run.memories[0]["personal.extractor.bn1.running_mean"].abs().sum() > 0


@pytest.mark.parametrize("objective", ["simclr", "byol", "moco"])
def test_it_learns_without_labels_on_every_engine(objective):
    method, fields = {"name": "ditto", "towards": "optimised", "lam": 2.0}, {"training__rounds": 2}
    expected, got = (tiny_run(method, objective=objective, engine=e, **fields) for e in ("inline", "replay"))
    assert same_state(got.server.state, expected.server.state)
    assert same_state(expected.server.state, reference("fedavg", objective=objective, **fields).state)
    assert [s.loss for s in got.scores] == [s.loss for s in expected.scores]


def test_without_labels_the_personal_network_is_what_is_probed():
    run = ByHand(get("ditto+probe"), unlabelled())
    run.round()
    client, x = run.personal(0), Fixed().x
    assert torch.equal(run.method.represent(client, x), client.personal.extractor(x))
    shared = ByHand(get("ditto+probe", personal_network="global"), unlabelled())
    shared.round()
    client = shared.personal(0)
    assert torch.equal(shared.method.represent(client, x), client.model.extractor(x))
