"""Slow copies follow, queues fill, and what should stay local does."""

import numpy as np
import pytest
import torch
from references import reference
from tiny import same_state, tiny_run, tiny_task

from fedloom import objectives
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.setup import Setup
from fedloom.core.state import snapshot
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


def client_with(objective, **options):
    from dataclasses import replace

    task = replace(tiny_task(norm=False), objective=objectives.get(objective, **options))
    lane = Workspace(Setup(task, get("fedavg+probe"), Training(batch_size=16), seed=0))
    lane.load({}, None)
    return Client(lane, id=0, round=1, job="update", samples=task.samples(0), first=True)


def fit_once(client):
    client.fit("model", get("fedavg").loss, epochs=1)


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_the_slow_copy_is_a_moving_average_of_every_step(objective):
    client = client_with(objective, momentum=0.9)
    history = [snapshot(client.parts)["model.extractor.fc1.weight"]]

    def loss(client, batch, history=history):
        history.append(snapshot(client.parts)["model.extractor.fc1.weight"])
        return client.objective(client.model, batch)

    client.fit("model", loss)
    after = snapshot(client.parts)
    slow = history[0]
    for weights in [*history[2:], after["model.extractor.fc1.weight"]]:
        slow = 0.9 * slow + 0.1 * weights
    torch.testing.assert_close(after["model.target.extractor.fc1.weight"], slow, rtol=1e-5, atol=1e-6)


def test_the_queue_holds_the_last_keys():
    client = client_with("moco", keys=32)
    before = snapshot(client.parts)["model.target.queue"]
    fit_once(client)
    after = snapshot(client.parts)
    assert after["model.target.pointer"].item() == client.size % 32
    assert not torch.equal(before, after["model.target.queue"])
    torch.testing.assert_close(after["model.target.queue"].norm(dim=1), torch.ones(32))


def test_a_slow_copy_is_no_parameter():
    client = client_with("byol")
    assert not any("target" in name for name, _ in client.parts.named_parameters())


@pytest.mark.parametrize(
    ("objective", "epochs"), [("simclr", 20), ("simsiam", 20), ("byol", 20), ("moco", 60), ("barlow", 60)]
)
def test_training_lowers_the_loss(objective, epochs):
    client = client_with(objective, **({"keys": 32} if objective == "moco" else {}))

    def measured():
        """Over many draws, hardly moving: one epoch of batches of 16 and less is noise (Barlow Twins: 130 ± 30)."""
        return client.fit("model", get("fedavg").loss, epochs=epochs // 4, lr=1e-12)["loss"].item()

    before = measured()  # MoCo's queue is random before
    lr = 0.005 if objective == "barlow" else 0.05  # 0.05 is too much for Barlow Twins on batches of 16
    client.fit("model", get("fedavg").loss, epochs=epochs, lr=lr)
    assert measured() < before


@pytest.mark.parametrize("objective", ["simclr", "byol", "moco"])
def test_engines_agree_without_labels(objective):
    fields = {"objective": objective, "training__rounds": 2}
    expected = reference("fedavg", **fields)
    for engine in ("processes", "replay"):
        assert same_state(tiny_run("fedavg", engine=engine, **fields).server.state, expected.state)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_labels_in_numpy(smoothing):
    logits, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    log_p = logits.numpy() - np.log(np.exp(logits.numpy()).sum(1, keepdims=True))
    target = (1 - smoothing) * np.eye(4)[y.numpy()] + smoothing / 4
    found = objectives.get("labels", smoothing=smoothing).classify(logits, y)
    assert found.item() == pytest.approx(-(target * log_p).sum(1).mean(), rel=1e-6)


def test_without_smoothing_labels_are_the_plain_cross_entropy():
    logits, y = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
    assert torch.equal(objectives.get("labels").classify(logits, y), torch.nn.functional.cross_entropy(logits, y))


SUPERVISED = ["fedavg", "fedcrl", "fedcrc", "fedproto", "fedpac", "moon", "fedintr", "fedcka", "ditto", "apfl"]


@pytest.mark.parametrize("method", SUPERVISED)
def test_smoothing_reaches_every_method(method):
    plain, smooth = (
        tiny_run(method, training__rounds=1, objective__smoothing=s).history[0]["loss"] for s in (0.0, 0.3)
    )
    assert smooth > plain + 1e-4


def test_smoothing_is_a_share():
    with pytest.raises(UserError, match="objective.smoothing = 1: must be below 1"):
        objectives.get("labels", smoothing=1)
