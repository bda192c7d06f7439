"""MOON: a projection below the classifier, contrasted with the global and the last local model's."""

import numpy as np
import pytest
import torch
from by_hand import ByHand, Fixed, perturb
from tiny import same_state, tiny_run, tiny_task
from torch import nn
from torch.nn.functional import cross_entropy

from fedloom.methods import get, hyperparameters, method_class
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.moon import MOON


@pytest.fixture
def fedavg_on_it():
    """FedAvg, on MOON's network."""

    class OnProjection(FedAvg):
        def build(self, task):
            return {"model": MOON().build(task)["model"]}

    return "onprojection"


def test_without_its_loss_it_is_fedavg_on_the_projection_network_bit_for_bit(fedavg_on_it):
    assert same_state(tiny_run({"name": "moon", "mu": 0.0}).server.state, tiny_run(fedavg_on_it).server.state)


def test_round_one_is_fedavg_on_it(fedavg_on_it):
    one = {"training__rounds": 1, "task": tiny_task(norm=False)}
    plain, contrasted = tiny_run(fedavg_on_it, **one).server.state, tiny_run({"name": "moon", "mu": 5.0}, **one)
    for name, value in plain.items():
        torch.testing.assert_close(contrasted.server.state[name], value, rtol=1e-4, atol=1e-5)


def test_later_rounds_are_not(fedavg_on_it):
    plain, contrasted = tiny_run(fedavg_on_it).server.state, tiny_run({"name": "moon", "mu": 5.0}).server.state
    assert any(not torch.allclose(plain[name], contrasted[name], atol=1e-3) for name in plain)


def test_the_classifier_sits_on_a_two_layer_projection_of_256():
    model = ByHand(get("moon")).lane.parts.model
    assert [type(m) for m in model.projection] == [nn.Linear, nn.ReLU, nn.Linear]
    assert (model.projection[2].out_features, model.head.in_features) == (256, 256)
    x = Fixed().x
    assert torch.equal(model(x), model.head(model.projection(model.extractor(x))))


def test_at_the_side_the_classifier_does_not_see_it():
    model = ByHand(get("moon", projection="side")).lane.parts.model
    x = Fixed().x
    assert torch.equal(model(x), model.head(model.extractor(x)))
    plain = ByHand(get("fedavg")).lane.parts.model
    assert torch.equal(model(x), plain(x))  # the same initial network as everybody's


@pytest.mark.parametrize("projection", ["below", "side"])
def test_the_loss_is_eq_4_sample_by_sample(projection):
    run = ByHand(get("moon", mu=3.0, tau=0.4, projection=projection))
    client, batch = run.at_work(0), Fixed()
    for seed, part in enumerate((client.model, client.previous, client.received.model)):
        perturb(part, seed=seed)

    def z(model):
        return model.projection(model.extractor(batch.x)).detach().double().numpy()

    def cosine(a, b):
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    mine = z(client.model)
    near, far = np.exp(cosine(mine, z(client.received.model)) / 0.4), np.exp(cosine(mine, z(client.previous)) / 0.4)
    expected = cross_entropy(client.model(batch.x), batch.y).item() + 3 * np.mean(-np.log(near / (near + far)))
    assert run.method.loss(client, batch).item() == pytest.approx(expected, rel=1e-5)


def test_no_gradient_reaches_the_references_and_some_reaches_the_projection():
    run = ByHand(get("moon"))
    client = run.at_work(0)
    perturb(client.previous)
    for part in (client.model, client.previous):
        part.requires_grad_(True)
    loss = run.method.loss(client, Fixed())
    found = torch.autograd.grad(
        loss, [client.previous.projection[0].weight, client.model.projection[0].weight], allow_unused=True
    )
    assert found[0] is None
    assert found[1].abs().sum() > 0


def test_the_previous_model_is_the_last_local_one_and_stays_while_the_projection_travels():
    run = ByHand(get("moon"))
    sent = run.round([0])[0]
    assert any("projection" in name for name in sent)
    assert all(torch.equal(run.memories[0]["previous" + name[5:]], value) for name, value in sent.items())
    assert all(name.startswith("previous.") for name in run.memories[0])


def test_everybody_is_served_by_the_shared_model():
    run = tiny_run("moon")
    assert run.method.personal_is_global
    assert run.history[0]["evaluated"] == 6


def test_no_default_switches_it_off():
    assert hyperparameters(method_class("moon"))["mu"] > 0


def test_batch_norm_statistics_travel():
    assert tiny_run("moon").server.state["model.extractor.bn1.running_mean"].abs().sum() > 0
