"""FedAMP: without pull it is Local; with it, clients are drawn to mixtures that formulas in NumPy give."""

import numpy as np
import pytest
import torch
from by_hand import ByHand, Fixed, even_task, parameters, perturb, watched
from tiny import same_state, tiny_run, tiny_task
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.methods import get


def scores(run):
    return [(s.client, s.right, s.loss) for s in run.scores]


@pytest.mark.parametrize("similarity", ["distance", "cosine"])
def test_without_pull_it_is_local_bit_for_bit(similarity):
    free, local = tiny_run({"name": "fedamp", "lam": 0.0, "similarity": similarity}), tiny_run("local")
    assert scores(free) == scores(local)


def test_with_pull_it_is_not_local():
    """A proximal term without a gradient would be Local."""
    assert scores(tiny_run("fedamp")) != scores(tiny_run("local"))


def test_the_proximal_term_has_a_gradient():
    run = ByHand(get("fedamp", lam=6.0, alpha_k=2.0))
    client, batch = run.at_work(0), Fixed()
    perturb(client.model)
    client.model.requires_grad_(True)
    plain = cross_entropy(client.model(batch.x), batch.y)
    got, bare = (torch.autograd.grad(f, client.model.head.weight)[0] for f in (run.method.loss(client, batch), plain))
    pull = 6.0 / 2.0 * (client.model.head.weight - client.received.mixture.head.weight)
    assert pull.abs().max() > 0.1
    torch.testing.assert_close(got, bare + pull)


def test_with_unit_rate_every_step_gives_u_minus_the_gradient():
    """lr · λ/α_k = 1 and plain SGD: w ← u_i − lr ∇f(w)."""
    task = tiny_task(augment=(), norm=False)
    run = ByHand(get("fedamp", lam=8.0, alpha_k=0.4, sigma=4.0), task, optimizer={"lr": 0.05})
    run.round()
    memory = {name: value.clone() for name, value in run.memories[0].items()}
    client = run.at_work(0, memory=memory)
    u, w = parameters(client.received.mixture), parameters(client.model)
    assert not torch.allclose(u["head.weight"], w["head.weight"])
    for x, y in watched(run.method, "loss", client, lambda batch: (batch.x.clone(), batch.y.clone())):
        leaves = {n: p.clone().requires_grad_() for n, p in w.items()}
        gradients = torch.autograd.grad(
            cross_entropy(functional_call(client.model, leaves, x), y), list(leaves.values())
        )
        w = {n: u[n] - 0.05 * g for n, g in zip(u, gradients, strict=True)}
    for name, value in parameters(client.model).items():
        torch.testing.assert_close(value, w[name], rtol=1e-4, atol=1e-6)


def flat(message):
    return np.concatenate([v.double().numpy().ravel() for v in message.values()])


def test_the_mixture_is_the_paper_s():
    run = ByHand(get("fedamp", alpha_k=0.7, sigma=5.0))
    sent = run.round([0, 1, 2])
    w = {c: flat(sent[c]) for c in sent}
    for i in w:
        xi = {j: 0.7 * np.exp(-np.sum((w[i] - w[j]) ** 2) / 5.0) / 5.0 for j in w if j != i}
        u = (1 - sum(xi.values())) * w[i] + sum(xi[j] * w[j] for j in xi)
        np.testing.assert_allclose(flat(run.method.message_for(run.server, i)), u, rtol=1e-5, atol=1e-6)
        assert 0 < sum(xi.values()) < 1


@pytest.mark.parametrize("own_share", [None, 0.6])
def test_the_heuristic_goes_by_cosine(own_share):
    run = ByHand(get("fedamp", similarity="cosine", sharpness=9.0, own_share=own_share))
    sent = run.round([0, 1, 2])
    w = {c: flat(sent[c]) for c in sent}
    for i in w:
        others = [j for j in w if j != i]
        cosines = [w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in others]
        shares = np.exp(9.0 * np.array(cosines))
        own = 1 / 3 if own_share is None else own_share
        shares *= (1 - own) / shares.sum()
        u = own * w[i] + sum(s * w[j] for s, j in zip(shares, others, strict=True))
        np.testing.assert_allclose(flat(run.method.message_for(run.server, i)), u, rtol=1e-5, atol=1e-6)


def test_a_client_goes_on_from_its_own_model_and_is_served_by_it():
    run = ByHand(get("fedamp"), epochs=0)
    run.round([0])
    run.memories[0] = {name: value + 1 for name, value in run.memories[0].items()}
    before = dict(run.memories[0])
    run.round([0])
    assert same_state(run.memories[0], before)  # no epochs: nothing but its own model
    client = run.personal(0)
    assert torch.equal(client.model.head.weight, before["model.head.weight"])


def test_remembered_models_are_copies_that_mixing_leaves_alone():
    run = ByHand(get("fedamp"), even_task(3))
    run.round()
    before = {c: {n: v.clone() for n, v in run.server.clients[c].items()} for c in run.clients}
    for c in run.clients:
        run.method.message_for(run.server, c)
    assert all(same_state(dict(run.server.clients[c]), before[c]) for c in run.clients)


def test_who_has_not_sent_anything_counts_as_the_initial_model():
    run = ByHand(get("fedamp", sigma=5.0))
    initial = {name: value.clone() for name, value in run.server.state.items()}
    assert same_state(dict(run.method.message_for(run.server, 3)), initial)
    sent = run.round([0])
    w, other = flat(initial), flat(sent[0])
    xi = np.exp(-np.sum((w - other) ** 2) / 5.0) / 5.0
    np.testing.assert_allclose(flat(run.method.message_for(run.server, 3)), w + xi * (other - w), rtol=1e-5, atol=1e-6)


def test_it_refuses_what_would_divide_by_zero():
    with pytest.raises(UserError, match="method.alpha_k = 0"):
        tiny_run({"name": "fedamp", "alpha_k": 0})
