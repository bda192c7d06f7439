"""APFL: w is FedAvg's for every α; v learns through the mixture and is never overwritten by it."""

import pytest
import torch
from by_hand import ByHand, Fixed, parameters, perturb, unlabelled, watched
from tiny import same_state, tiny_run, tiny_task
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.losses import nt_xent
from fedloom.methods import get

pytestmark = pytest.mark.full

ALL = {"training__fraction": 1.0, "task": tiny_task(norm=False)}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_shared_half_is_fedavg_for_every_alpha_bit_for_bit(alpha, adaptive):
    run = tiny_run({"name": "apfl", "alpha": alpha, "adaptive": adaptive})
    assert same_state(run.server.state, tiny_run("fedavg").server.state)


def test_with_alpha_zero_the_personal_model_is_the_aggregated_one_bit_for_bit():
    run = ByHand(get("apfl", alpha=0.0))
    run.round()
    run.round()
    for client in run.clients:
        personal = {f"model.{name}": value for name, value in parameters(run.personal(client).personal).items()}
        assert same_state(personal, run.server.state)


def test_with_alpha_one_the_personal_model_is_the_local_one_bit_for_bit():
    mixed, local = tiny_run({"name": "apfl", "alpha": 1.0}, **ALL), tiny_run("local", **ALL)
    assert [(s.client, s.right, s.loss) for s in mixed.scores] == [(s.client, s.right, s.loss) for s in local.scores]


def test_the_personal_model_is_the_mixture_with_the_aggregated_w():
    run = ByHand(get("apfl", alpha=0.25))
    run.round()
    run.round([1, 2])  # w moves on without client 0
    client = run.personal(0)
    for name, value in parameters(client.personal).items():
        v, w = run.memories[0][f"personal.{name}"], run.server.state[f"model.{name}"]
        torch.testing.assert_close(value, 0.25 * v + 0.75 * w)
    x = Fixed().x
    assert torch.equal(run.method.predict(client, x), client.personal(x))


def reference(v, w, alpha, network, batches, lr, adaptive=False):
    """Plain torch, step by step: both gradients first, then both moves (Alg. 1, Eq. 3)."""
    for x, y in batches:
        leaves = {n: p.clone().requires_grad_() for n, p in w.items()}
        g_w = torch.autograd.grad(cross_entropy(functional_call(network, leaves, x), y), list(leaves.values()))
        mixed = {n: (alpha * v[n] + (1 - alpha) * w[n]).requires_grad_() for n in v}
        g = torch.autograd.grad(cross_entropy(functional_call(network, mixed, x), y), list(mixed.values()))
        slope = sum(((v[n] - w[n]) * d).sum().item() for n, d in zip(v, g, strict=True))
        v = {n: v[n] - lr * alpha * d for n, d in zip(v, g, strict=True)}
        w = {n: w[n] - lr * d for n, d in zip(w, g_w, strict=True)}
        if adaptive:
            alpha = min(1.0, max(0.0, alpha - lr * slope))
    return v, w, alpha


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_round_is_the_paper_s_step_by_step(adaptive):
    run = ByHand(get("apfl", alpha=0.4, adaptive=adaptive), tiny_task(augment=(), norm=False), epochs=2)
    client = run.at_work(0)
    perturb(client.personal, 0.3)
    v, w = parameters(client.personal), parameters(client.model)
    seen = watched(run.method, "step", client, lambda batch: (batch.x.clone(), batch.y.clone()))
    v, w, alpha = reference(v, w, 0.4, client.model, seen, 0.05, adaptive)
    assert len(seen) == 8
    for name in v:
        torch.testing.assert_close(parameters(client.personal)[name], v[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(parameters(client.model)[name], w[name], rtol=1e-4, atol=1e-6)
    assert client.alpha.item() == pytest.approx(alpha, rel=1e-4)
    assert (abs(alpha - 0.4) > 1e-4) == adaptive


def test_v_is_what_is_kept_not_the_mixture():
    """A client that does not take part keeps its v, however often it is evaluated."""
    run = ByHand(get("apfl"))
    run.round()
    before = {name: value.clone() for name, value in run.memories[0].items()}
    run.personal(0)
    run.round([1])
    assert same_state(run.memories[0], before)
    client = run.personal(0)
    assert not torch.equal(client.personal.head.weight, before["personal.head.weight"])


def test_alpha_adapts_stays_in_bounds_and_is_the_client_s_own():
    run = ByHand(get("apfl", adaptive=True), epochs=3, optimizer={"lr": 0.5})
    for _ in range(3):
        run.round()
    alphas = [memory["alpha"].item() for memory in run.memories.values()]
    assert len(set(alphas)) > 1
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert all("alpha" not in message for message in run.sent.values())


def test_outputs_are_mixed_across_views_with_alpha_on_the_global_one():
    """FedStyle's appendix, lines 5–13, against plain torch."""
    run = ByHand(get("apfl", mixes="outputs", alpha=0.3), unlabelled(), batch_size=64)  # one step
    client = run.at_work(0)
    perturb(client.personal)
    before_v, before_w = parameters(client.personal), parameters(client.model)
    ((x1, x2),) = watched(run.method, "step_outputs", client, lambda batch: tuple(v.clone() for v in batch.views))

    def after(weights, loss):
        leaves = {n: p.clone().requires_grad_() for n, p in weights.items()}
        gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
        return {n: weights[n] - 0.05 * g for n, g in zip(weights, gradients, strict=True)}

    def z(weights, x):
        return functional_call(client.model, weights, x)

    w = after(before_w, lambda p: nt_xent(z(p, x1), z(p, x2), 0.07))
    g1, g2 = z(before_w, x1).detach(), z(before_w, x2).detach()
    v = after(before_v, lambda p: nt_xent(0.3 * g1 + 0.7 * z(p, x2), 0.3 * g2 + 0.7 * z(p, x1), 0.07))
    for name in v:
        torch.testing.assert_close(parameters(client.model)[name], w[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parameters(client.personal)[name], v[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["simclr", "simsiam", "byol", "barlow"])
def test_without_the_global_output_v_learns_the_plain_objective(objective):
    """At α = 0 a step of v is one of w, which starts alike: no view is compared with itself."""
    run = ByHand(get("apfl", mixes="outputs", alpha=0.0), unlabelled(objective), batch_size=64)  # one step
    (sent,) = run.round([0]).values()
    kept = run.memories[0]
    for name, w in ((name, w) for name, w in sent.items() if "slow" not in name):
        torch.testing.assert_close(kept["personal" + name.removeprefix("model")], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mixes", "objective"), [("outputs", "simclr"), ("weights", "byol"), ("outputs", "byol"), ("weights", "moco")]
)
def test_it_learns_without_labels_on_every_engine(mixes, objective):
    method, fields = {"name": "apfl", "mixes": mixes}, {"objective": objective, "training__rounds": 2}
    expected, got = tiny_run(method, **fields), tiny_run(method, engine="replay", **fields)
    assert same_state(got.server.state, expected.server.state)
    assert [s.loss for s in got.scores] == [s.loss for s in expected.scores]
    assert all(torch.isfinite(v).all() for v in got.server.state.values())


def test_without_labels_the_personal_network_is_what_is_probed():
    run = ByHand(get("apfl+probe", mixes="outputs"), unlabelled())
    run.round()
    client = run.personal(0)
    x = Fixed().x
    assert torch.equal(run.method.represent(client, x), client.personal.extractor(x))
    assert not torch.allclose(run.method.represent(client, x), run.method.represent_global(client, x))
    assert "own.fc1.weight" not in run.memories[0]


def test_outputs_are_for_learning_without_labels():
    with pytest.raises(UserError, match="mixes = 'outputs': needs an objective without labels"):
        tiny_run({"name": "apfl", "mixes": "outputs"})


def test_batch_norm_statistics_of_both_models_are_kept_or_averaged():
    run = ByHand(get("apfl"), tiny_task(norm=True))
    run.round()
    assert run.server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
    assert run.memories[0]["personal.extractor.bn1.running_mean"].abs().sum() > 0
