"""FedIntR: round one is FedAvg, the previous model is the client's last, taps go by name."""

import pytest
import torch
from tiny import tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.losses import layerwise_contrastive
from fedloom.methods import get


def test_round_one_is_fedavg():
    one = {"training__rounds": 1, "task": tiny_task(norm=False)}
    plain = tiny_run("fedavg", **one).server.state
    regularised = tiny_run({"name": "fedintr", "mu": 5.0}, **one).server.state
    for name, value in plain.items():
        torch.testing.assert_close(regularised[name], value, rtol=1e-4, atol=1e-5)


def test_later_rounds_are_not():
    plain, regularised = tiny_run("fedavg").server.state, tiny_run({"name": "fedintr", "mu": 5.0}).server.state
    assert any(not torch.allclose(plain[name], regularised[name], atol=1e-3) for name in plain)


def test_the_previous_model_is_the_last_local_one_and_stays():
    lane = Workspace(Setup(tiny_task(), get("fedintr"), Training(batch_size=16), seed=0))
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert all(name.startswith("previous.") for name in result.memory)
    assert all(name.startswith("model.") for name in result.message)
    for name, value in result.message.items():
        assert torch.equal(result.memory["previous" + name[5:]], value)


def test_taps_go_by_name_and_projections_travel():
    run = tiny_run({"name": "fedintr", "taps": ["extractor.relu1"], "width": 8})
    projections = {name for name in run.server.state if "projections" in name}
    assert projections == {f"model.projections.0.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    with pytest.raises(UserError, match="layer 'extractor.rely1'.*did you mean 'extractor.relu1'"):
        tiny_run({"name": "fedintr", "taps": ["extractor.rely1"]})


@pytest.mark.parametrize("weights", ["softmax", "average"])
@pytest.mark.parametrize("similarity", ["sample", "batch"])
def test_the_loss_is_eq_5(weights, similarity):
    method = get("fedintr", mu=3.0, similarity=similarity, weights=weights)
    lane = Workspace(Setup(tiny_task(norm=False), method, Training(), seed=0))
    client = Client(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True)
    with torch.no_grad():
        for parameter in (*client.received.parameters(), *client.previous.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape))

    class Fixed:
        x = torch.rand(8, 1, 8, 8)
        y = torch.arange(8) % 4

    logits, z = client.model.layers(Fixed.x)
    _, z_global = client.received.model.layers(Fixed.x)
    _, z_previous = client.previous.layers(Fixed.x)
    expected = cross_entropy(logits, Fixed.y) + 3 * layerwise_contrastive(
        z, z_global, z_previous, 0.5, similarity, weights
    )
    torch.testing.assert_close(method.loss(client, Fixed), expected)
