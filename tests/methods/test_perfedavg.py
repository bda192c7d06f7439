"""Per-FedAvg: the gradient at the adapted weights moves the original ones; a step makes the personal model."""

import pytest
import torch
from by_hand import ByHand, parameters
from tiny import same_state, tiny_run, tiny_task
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.methods import get
from fedloom.methods.perfedavg import PerFedAvg

TASK = tiny_task(augment=(), norm=False)


def batches_of(method, client):
    """Updates the client; the batches of every step."""
    seen, original = [], PerFedAvg.step

    def watch(self, client, *batches, seen=seen, original=original):
        seen.append([(batch.x.clone(), batch.y.clone()) for batch in batches])
        original(self, client, *batches)

    try:
        PerFedAvg.step = watch
        method.update(client)
    finally:
        PerFedAvg.step = original
    return seen


def gradient(network, weights, batch):
    leaves = {n: p.detach().clone().requires_grad_() for n, p in weights.items()}
    loss = cross_entropy(functional_call(network, leaves, batch[0]), batch[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_first_order_applies_the_adapted_gradient_to_the_original_weights():
    run = ByHand(get("perfedavg", alpha=0.3), TASK)
    client = run.at_work(0)
    w = parameters(client.model)
    seen = batches_of(run.method, client)
    adapted_start = dict(w)
    for inner, outer in seen:
        g = gradient(client.model, w, inner)
        g2 = gradient(client.model, {n: w[n] - 0.3 * g[n] for n in w}, outer)
        w = {n: w[n] - 0.05 * g2[n] for n in w}
        g = gradient(client.model, adapted_start, inner)
        adapted_start = {n: adapted_start[n] - 0.3 * g[n] for n in w}
        g = gradient(client.model, adapted_start, outer)
        adapted_start = {n: adapted_start[n] - 0.05 * g[n] for n in w}
    assert len(seen) == 4
    for name, value in parameters(client.model).items():
        torch.testing.assert_close(value, w[name], rtol=1e-4, atol=1e-6)
    assert (parameters(client.model)["head.weight"] - adapted_start["head.weight"]).abs().max() > 0.05


def test_hessian_free_is_the_second_order_step():
    """Against the exact (I − α∇²f) ∇f(w − α∇f), by double backward in float64; δ so small that no ReLU switches."""
    run = ByHand(get("perfedavg", alpha=0.3, variant="hf", delta=1e-4), TASK, batch_size=64)  # one step
    client = run.at_work(0)
    w = {n: p.double() for n, p in parameters(client.model).items()}
    ((inner, outer, third),) = batches_of(run.method, client)
    inner, outer, third = ((x.double(), y) for x, y in (inner, outer, third))
    network = client.model
    g = gradient(network, w, inner)
    g2 = gradient(network, {n: w[n] - 0.3 * g[n] for n in w}, outer)
    leaves = {n: p.clone().requires_grad_() for n, p in w.items()}
    loss = cross_entropy(functional_call(network, leaves, third[0]), third[1])
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    along = sum((s * g2[n]).sum() for n, s in zip(leaves, slopes, strict=True))
    hessian = dict(zip(leaves, torch.autograd.grad(along, list(leaves.values())), strict=True))
    moved = {n: -0.05 * (g2[n] - 0.3 * hessian[n]) for n in w}
    first_order = {n: -0.05 * g2[n] for n in w}
    got = {n: p.double() - w[n] for n, p in parameters(client.model).items()}

    def away(expected):
        return (
            sum((got[n] - expected[n]).square().sum() for n in got).sqrt()
            / sum(moved[n].square().sum() for n in got).sqrt()
        )

    assert away(moved) < 0.01
    assert away(first_order) > 0.05


def test_the_personal_model_is_one_full_gradient_step():
    run = ByHand(get("perfedavg", alpha=0.2), TASK)
    run.round()
    shared = {name.removeprefix("model."): value.clone() for name, value in run.server.state.items()}
    index = torch.from_numpy(TASK.samples(0))
    batch = TASK.stored.plain(index), TASK.stored.labels[index]
    for epochs in (1, 2):
        run.method = get("perfedavg", alpha=0.2, adapt_epochs=epochs)
        run.memories.setdefault(0, {})
        client = run.personal(0)
        expected = dict(shared)
        for _ in range(epochs):
            g = gradient(client.model, expected, batch)
            expected = {n: expected[n] - 0.2 * g[n] for n in expected}
        for name, value in parameters(client.model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_without_adaptation_it_is_served_by_the_shared_model():
    still, adapted = tiny_run({"name": "perfedavg", "adapt_epochs": 0}), tiny_run("perfedavg")
    assert same_state(still.server.state, adapted.server.state)
    assert [s.loss for s in still.scores] != [s.loss for s in adapted.scores]
    assert still.history[-1]["global_accuracy"] == adapted.history[-1]["global_accuracy"]


def test_with_alpha_zero_the_outer_step_is_plain_training():
    """One client, one step: f(w − 0) on the outer batch."""
    run = ByHand(get("perfedavg", alpha=0.0), TASK, batch_size=64)
    client = run.at_work(0)
    w = parameters(client.model)
    ((_, outer),) = batches_of(run.method, client)
    g = gradient(client.model, w, outer)
    for name, value in parameters(client.model).items():
        torch.testing.assert_close(value, w[name] - 0.05 * g[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_both_variants_replay_bit_for_bit_and_average_statistics(variant):
    method = {"name": "perfedavg", "variant": variant}
    expected, got = tiny_run(method), tiny_run(method, engine="replay")
    assert same_state(got.server.state, expected.server.state)
    assert got.server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
