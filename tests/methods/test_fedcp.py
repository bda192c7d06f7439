"""FedCP: a policy divides each feature between a personal and a frozen global head."""

import pytest
import torch
from by_hand import ByHand, Fixed, assert_close_runs, perturb
from tiny import same_state, tiny_run, tiny_task
from torch.nn.functional import cross_entropy, layer_norm

from fedloom.core.state import snapshot
from fedloom.methods import get
from fedloom.methods.fedcp import discrepancy


def give_all_to_the_personal_head(run):
    """Set the policy to r = 1, and the global head, which then reads zeros, to no bias."""
    features = run.task.features
    run.server.state["policy.1.weight"] = torch.zeros(2 * features)
    run.server.state["policy.1.bias"] = torch.cat([torch.full((features,), 200.0), torch.zeros(features)])
    run.server.state["head.bias"] = torch.zeros(4)


def test_the_loss_is_that_of_the_paper():
    method = get("fedcp", lam=2.0)
    run = ByHand(method)
    client, batch = run.at_work(0), Fixed()
    perturb(client.model)
    perturb(client.received.head, seed=1)
    method.personalise(client)
    z, reference = client.model.extractor(batch.x), client.received.model.extractor(batch.x)
    v = client.model.head.weight.sum(0)
    a = (v / v.norm() * z) @ client.policy[0].weight.T + client.policy[0].bias
    a = torch.relu(layer_norm(a, a.shape[1:]))
    r, s = torch.softmax(torch.stack([a[:, :64], a[:, 64:]]), 0)
    logits = client.model.head(r * z) + client.received.head(s * z)
    k = [
        sum(torch.exp(-(x[:, None] - y).square().sum(2) / (2 * band)).mean() for band in (10, 15, 20, 50))
        for x, y in ((z, z), (reference, reference), (z, reference))
    ]
    expected = cross_entropy(logits, batch.y) + 2 * (k[0] + k[1] - 2 * k[2])
    assert method.loss(client, batch).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_policy_that_gives_everything_to_the_personal_head_is_fedper():
    same, fedper = ByHand(get("fedcp", lam=0.0)), ByHand(get("fedper"))
    for _ in range(2):
        give_all_to_the_personal_head(same)
        same.round()
        fedper.round()
    assert_close_runs(same, fedper)


def test_global_head_and_extractor_are_frozen_while_a_client_trains():
    run = ByHand(get("fedcp"))
    run.round()
    client = run.at_work(0)
    received = snapshot(run.lane.received)
    run.method.update(client)
    assert same_state(snapshot(run.lane.received), received)
    assert not torch.equal(client.model.extractor.fc1.weight, received["model.extractor.fc1.weight"])


@pytest.mark.parametrize("uploads", ["personal", "mean"])
def test_which_head_is_sent(uploads):
    run = ByHand(get("fedcp", uploads=uploads), tiny_task())
    run.round()
    sent = run.round()[0]
    own, received = run.memories[0]["model.head.weight"], run.received[0]["head.weight"]
    expected = own if uploads == "personal" else (own + received) / 2
    torch.testing.assert_close(sent["head.weight"], expected)
    assert not any(name.startswith(("model.head", "context")) for name in sent)
    assert set(run.memories[0]) == {"model.head.weight", "model.head.bias"}


def test_equal_samples_have_no_discrepancy_and_gradients_are_finite():
    x = torch.randn(8, 5, requires_grad=True)
    value = discrepancy(x, x.detach())
    assert value.item() == pytest.approx(0, abs=1e-5)
    assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()


def test_noise_changes_training_only():
    plain, noisy = tiny_run("fedcp"), tiny_run({"name": "fedcp", "noise": True})
    assert plain.history[0]["loss"] != noisy.history[0]["loss"]
    client, x = ByHand(get("fedcp", noise=True)).at_work(0), Fixed().x
    method = get("fedcp", noise=True)
    assert torch.equal(method.predict(client, x), method.predict(client, x))


def test_a_frozen_head_gives_the_context_too():
    run = tiny_run("fedcp", task=tiny_task("mlp", freeze=("head",)))
    assert all(record["loss"] is not None for record in run.history)
