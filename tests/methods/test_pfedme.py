"""pFedMe: proximal steps of θ, then w moves towards it; θ is a separate copy."""

import pytest
import torch
from by_hand import ByHand, Fixed, even_task, parameters, watched
from tiny import same_state, tiny_run, tiny_task
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.methods import get


def test_a_round_is_the_paper_s_step_by_step():
    run = ByHand(get("pfedme", lam=10.0, inner=3, personal_lr=0.03), tiny_task(augment=(), norm=False))
    client = run.at_work(0)
    w = parameters(client.model)
    theta = dict(w)
    seen = watched(run.method, "step", client, lambda batch: (batch.x.clone(), batch.y.clone()))
    for x, y in seen:
        for _ in range(3):
            leaves = {n: p.clone().requires_grad_() for n, p in theta.items()}
            gradients = torch.autograd.grad(
                cross_entropy(functional_call(client.model, leaves, x), y), list(leaves.values())
            )
            theta = {n: theta[n] - 0.03 * (g + 10.0 * (theta[n] - w[n])) for n, g in zip(theta, gradients, strict=True)}
        w = {n: w[n] - 0.05 * 10.0 * (w[n] - theta[n]) for n in w}
    assert len(seen) == 4
    for name in w:
        torch.testing.assert_close(parameters(client.model)[name], w[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(parameters(client.personal)[name], theta[name], rtol=1e-4, atol=1e-6)


def test_the_personal_model_is_no_alias_of_the_shared_one():
    run = ByHand(get("pfedme"))
    for _ in range(2):
        run.round()
    client, x = run.personal(0), Fixed().x
    addresses = {p.data_ptr() for p in client.model.parameters()}
    assert not any(p.data_ptr() in addresses for p in client.personal.parameters())
    assert torch.equal(run.method.predict(client, x), client.personal(x))
    assert not torch.allclose(client.personal(x), client.model(x), atol=1e-3)
    theta = {f"personal.{name}": value for name, value in parameters(client.personal).items()}
    assert same_state(theta, run.memories[0])


def test_theta_starts_from_the_received_model_every_round():
    run = ByHand(get("pfedme"), epochs=0)
    run.round([0])
    run.server.state["model.head.weight"] = run.server.state["model.head.weight"] + 1
    run.round([0])
    assert torch.equal(run.memories[0]["personal.head.weight"], run.server.state["model.head.weight"])


def test_clients_weigh_alike_and_the_server_moves_by_beta():
    whole, half = ByHand(get("pfedme"), tiny_task()), ByHand(get("pfedme", beta=0.5), tiny_task())
    start = {name: value.clone() for name, value in whole.server.state.items()}
    sent = whole.round([0, 4])  # 52 samples and 5
    half.round([0, 4])
    name = "model.head.weight"
    mean = (sent[0][name] + sent[4][name]) / 2
    torch.testing.assert_close(whole.server.state[name], mean)
    torch.testing.assert_close(half.server.state[name], (start[name] + mean) / 2)


def test_with_unit_rate_w_is_theta():
    """ηλ = 1: w ← w − (w − θ)."""
    run = ByHand(get("pfedme", lam=20.0, personal_lr=0.01), even_task(), optimizer={"lr": 0.05})
    sent = run.round()
    for name, value in sent[0].items():
        torch.testing.assert_close(value, run.memories[0]["personal" + name[5:]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_batch_norm_statistics_travel_and_are_never_extrapolated(beta):
    run = ByHand(get("pfedme", beta=beta), tiny_task(norm=True))
    sent = run.round()
    name = "model.extractor.bn1.running_var"
    assert not torch.equal(sent[0][name], torch.ones_like(sent[0][name]))
    mean = torch.stack([message[name] for message in sent.values()]).mean(0)
    torch.testing.assert_close(run.server.state[name], mean)


def test_it_learns():
    run = tiny_run("pfedme", training__rounds=8, training__fraction=1.0)
    assert run.history[-1]["personal_accuracy"] > run.history[0]["personal_accuracy"] or (
        run.history[-1]["loss"] < 0.5 * run.history[0]["loss"]
    )


def test_at_least_one_step_for_a_batch():
    with pytest.raises(UserError, match="method.inner = 0: must be at least 1"):
        tiny_run({"name": "pfedme", "inner": 0})
