"""FedCKA: the first two layers, raw, more like the global model's than like the last local one's."""

import numpy as np
import pytest
import torch
from by_hand import ByHand, Fixed, perturb
from tiny import same_state, tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.core.errors import UserError
from fedloom.methods import get
from fedloom.models.base import tapped


def test_without_its_regulariser_it_is_fedavg_bit_for_bit():
    assert same_state(tiny_run({"name": "fedcka", "mu": 0.0}).server.state, tiny_run("fedavg").server.state)


def test_round_one_is_fedavg():
    one = {"training__rounds": 1, "task": tiny_task(norm=False)}
    plain, regularised = tiny_run("fedavg", **one).server.state, tiny_run("fedcka", **one).server.state
    for name, value in plain.items():
        torch.testing.assert_close(regularised[name], value, rtol=1e-4, atol=1e-5)


def test_later_rounds_are_not():
    plain, regularised = tiny_run("fedavg").server.state, tiny_run("fedcka").server.state
    assert any(not torch.allclose(plain[name], regularised[name], atol=1e-4) for name in plain)


def cka(a, b):
    """By kernels: HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) with centred Gram matrices."""
    n = len(a)
    centre = np.eye(n) - np.ones((n, n)) / n
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    return (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("taps", [(), ("extractor.relu2",)])
def test_the_loss_is_the_paper_s(projected, taps):
    run = ByHand(get("fedcka", mu=2.5, projected=projected, taps=taps))
    client, batch = run.at_work(0), Fixed(12)
    for seed, part in enumerate((client.model, client.previous, client.received.model)):
        perturb(part, seed=seed)
    chosen = taps or ("extractor.relu1", "extractor.relu2")

    def layers(model):
        found = tapped(model, batch.x, chosen)[1]
        if projected:
            found = [project(z) for project, z in zip(model.projections, found, strict=True)]
        return [z.detach().double().numpy() for z in found]

    terms = []
    for z, g, p in zip(*map(layers, (client.model, client.received.model, client.previous)), strict=True):
        near, far = np.exp(cka(z, g)), np.exp(cka(z, p))
        terms.append(-np.log(near / (near + far)))
    expected = cross_entropy(client.model(batch.x), batch.y).item() + 2.5 * np.mean(terms)
    assert run.method.loss(client, batch).item() == pytest.approx(expected, rel=1e-5)


def test_only_the_first_two_layers_are_read():
    from dataclasses import replace

    from tiny import tiny_dataset

    task = replace(tiny_task("cnn2", dropout=0.0), dataset=tiny_dataset(shape=(1, 16, 16)))
    assert ByHand(get("fedcka"), task).lane.parts.model.taps == ("extractor.pool1", "extractor.pool2")
    with pytest.raises(UserError, match="layer 'extractor.rely1'"):
        tiny_run({"name": "fedcka", "taps": ["extractor.rely1"]})


def test_no_gradient_reaches_the_references():
    run = ByHand(get("fedcka"))
    client = run.at_work(0)
    perturb(client.previous)
    client.previous.requires_grad_(True)
    client.model.requires_grad_(True)
    loss = run.method.loss(client, Fixed())
    assert torch.autograd.grad(loss, client.previous.extractor.fc1.weight, allow_unused=True) == (None,)


def test_the_previous_model_is_the_last_local_one_and_everybody_is_served_by_the_shared_one():
    run = ByHand(get("fedcka"))
    sent = run.round([0])[0]
    assert all(torch.equal(run.memories[0]["previous" + name[5:]], value) for name, value in sent.items())
    assert run.method.personal_is_global
    assert tiny_run("fedcka").server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
