"""FedALA: with W at one it is FedAvg; W learns on the mixture, stays in [0, 1], and only in the top layers."""

import pytest
import torch
from by_hand import ByHand, parameters, perturb, watched
from tiny import same_state, tiny_run, tiny_task
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.methods import get


def test_with_frozen_weights_it_is_fedavg():
    frozen, plain = tiny_run({"name": "fedala", "eta": 0.0}).server.state, tiny_run("fedavg").server.state
    for name, value in plain.items():
        torch.testing.assert_close(frozen[name], value, rtol=1e-6, atol=1e-6)


def test_with_learning_weights_it_is_not():
    learning, plain = tiny_run("fedala").server.state, tiny_run("fedavg").server.state
    assert not torch.allclose(learning["model.head.weight"], plain["model.head.weight"], atol=1e-4)


def test_the_first_time_is_fedavg_and_leaves_w_at_one():
    run, plain = ByHand(get("fedala")), ByHand(get("fedavg"))
    run.round()
    plain.round()
    assert same_state(run.server.state, plain.server.state)
    assert all((v == 1).all() for n, v in run.memories[0].items() if n.startswith("weights."))
    assert run.memories[0]["fitted"] == 0


def apart(run):
    """Client 0 at work, its own model and W elsewhere."""
    client = run.at_work(0, memory={})
    perturb(client.model, 0.3)
    with torch.no_grad():
        client.weights.head.weight.uniform_(0.2, 0.9, generator=torch.Generator().manual_seed(0))
    return client


def test_lower_layers_come_from_the_server_and_top_ones_are_mixed_elementwise():
    run = ByHand(get("fedala", eta=0.0), tiny_task(norm=True), epochs=0)
    client = apart(run)
    own, theirs, W = (parameters(m) for m in (client.model, client.received.model, client.weights))
    with torch.no_grad():
        client.model.extractor.bn1.running_mean.fill_(7.0)
    run.method.update(client)
    for name, value in parameters(client.model).items():
        if name.startswith("head."):
            torch.testing.assert_close(value, own[name] + (theirs[name] - own[name]) * W[name])
            assert name == "head.bias" or not torch.allclose(value, theirs[name])
        else:
            assert torch.equal(value, theirs[name])
    assert (client.model.extractor.bn1.running_mean == 0).all()  # statistics too are the server's


def test_a_step_of_w_is_the_paper_s():
    task = tiny_task(augment=(), norm=False)
    run = ByHand(get("fedala", eta=2.0, most_epochs=1, fraction=1.0), task, epochs=0, batch_size=64)
    client = apart(run)
    own, theirs, W = (parameters(m) for m in (client.model, client.received.model, client.weights))
    ((x, y),) = watched(run.method, "learn", client, lambda batch: (batch.x.clone(), batch.y.clone()))
    leaf = W["head.weight"].clone().requires_grad_()
    difference = theirs["head.weight"] - own["head.weight"]
    mixed = theirs | {"head.bias": theirs["head.bias"], "head.weight": own["head.weight"] + difference * leaf}
    (g,) = torch.autograd.grad(cross_entropy(functional_call(client.received.model, mixed, x), y), leaf)
    expected = (W["head.weight"] - 2.0 * g).clamp(0, 1)
    torch.testing.assert_close(client.weights.head.weight.detach(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, W["head.weight"], atol=1e-3)
    assert all((p == 1).all() for name, p in client.weights.named_parameters() if not name.startswith("head."))


def test_weights_stay_in_bounds_and_with_the_client():
    run = ByHand(get("fedala", eta=50.0))
    for _ in range(3):
        run.round()
    kept = [v for n, v in run.memories[0].items() if n.startswith("weights.")]
    assert {n for n in run.memories[0] if n.startswith("weights.")} == {"weights.head.weight", "weights.head.bias"}
    assert all(((v >= 0) & (v <= 1)).all() for v in kept)
    assert any((v < 1).any() for v in kept)
    assert all(name.startswith("model.") for name in run.sent[0])


class Counting:
    """A client that counts the epochs of W."""

    def __init__(self, client):
        self.client, self.epochs = client, 0

    def __getattr__(self, name):
        return getattr(self.client, name)

    def steps(self, step, **options):
        self.epochs += 1
        return self.client.steps(step, **options)


@pytest.mark.parametrize(("threshold", "most", "expected"), [(1e9, 100, 11), (0.0, 14, 14)])
def test_w_is_fitted_until_its_loss_stands_still_once_and_then_for_an_epoch(threshold, most, expected):
    run = ByHand(get("fedala", threshold=threshold, most_epochs=most))
    run.round([0])
    client = Counting(run.at_work(0, memory=run.memories[0]))
    run.method.fit_weights(client)
    assert client.epochs == expected
    assert client.fitted == 1
    run.method.fit_weights(client)
    assert client.epochs == expected + 1
    run.round([0])
    assert run.memories[0]["fitted"] == 1


def test_w_sees_a_share_of_the_data():
    run = ByHand(get("fedala", fraction=0.5, most_epochs=1), batch_size=100)
    client = run.at_work(0, memory={})
    (size,) = watched(run.method, "learn", client, lambda batch: batch.size)
    assert size == len(run.task.samples(0)) // 2


def test_an_unknown_layer_is_refused():
    with pytest.raises(UserError, match="method.top = 'haed'.*did you mean 'head'"):
        tiny_run({"name": "fedala", "top": ["haed"]})


def test_more_layers_can_be_mixed_on_every_engine():
    method = {"name": "fedala", "top": ["extractor.fc2", "head"]}
    expected, got = tiny_run(method), tiny_run(method, engine="replay")
    assert same_state(got.server.state, expected.server.state)


def test_batch_norm_statistics_travel():
    assert tiny_run("fedala").server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
