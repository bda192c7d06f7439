"""FedCRC: three steps with the right parts frozen, a slow global predictor, two results."""

from typing import ClassVar

import pytest
import torch
from tiny import tiny_run, tiny_task
from torch import nn

from fedloom.core.client import Client
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.state import snapshot
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


class Watched(Client):
    """Records which parts each fit moved."""

    moved: ClassVar[list] = []

    def fit(self, parts, loss, **options):
        before = snapshot(self.parts)
        result = super().fit(parts, loss, **options)
        after = snapshot(self.parts)
        Watched.moved.append((parts, {n for n in before if not torch.equal(before[n], after[n])}, result.steps))
        return result


def test_three_steps_in_order_and_frozen_parts_do_not_move_buffers_included():
    lane = Workspace(Setup(tiny_task(norm=True), get("fedcrc"), Training(batch_size=16, epochs=3), seed=0))
    Watched.moved = []
    client = Watched(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True)
    lane.setup.method.update(client)
    (first, f, steps), (second, h, steps2), (third, g, steps3) = Watched.moved
    names = lane.parts.named_tensors()
    assert (first, second, third) == ("model.extractor", "personal", "model.head")
    assert f == {n for n in names if n.startswith("model.extractor.")}  # running statistics too
    assert any("running_mean" in n for n in f)
    assert h == {"personal.weight", "personal.bias"}
    assert g == {"model.head.weight", "model.head.bias"}
    assert steps == steps2 == 3 * steps3


def test_the_global_predictor_moves_slowly_and_the_extractor_wholly():
    slow_run = tiny_run("fedcrc", training__rounds=1)
    start, slow = snapshot(slow_run.setup.build()), slow_run.server.state
    whole = tiny_run({"name": "fedcrc", "tau": 0.0}, training__rounds=1).server.state
    for name, value in slow.items():
        if name.startswith("model.head"):
            expected = 0.99 * start[name] + 0.01 * whole[name]  # Eq. 9
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, whole[name])


def test_one_run_gives_both_results_and_the_personal_predictor_stays():
    run = tiny_run("fedcrc")
    assert run.history[-1]["global_accuracy"] is not None
    assert run.history[-1]["personal_accuracy"] is not None
    assert {name.split(".")[0] for name in run.server.state} == {"model"}
    lane = Workspace(Setup(tiny_task(), get("fedcrc"), Training(batch_size=16), seed=0))
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert set(result.memory) == {"personal.weight", "personal.bias"}


@pytest.mark.parametrize("kl", ["imitate", "reverse"])
def test_the_predictor_loss_is_cross_entropy_and_divergence(kl):
    method = get("fedcrc", kl=kl)
    lane = Workspace(Setup(tiny_task(norm=False), method, Training(), seed=0))
    client = Client(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True)
    nn.init.normal_(client.personal.weight)

    class Fixed:
        x = torch.rand(8, 1, 8, 8)
        y = torch.arange(8) % 4

    z = client.model.extractor(Fixed.x)
    g, i = client.model.head(z).softmax(1).double(), client.personal(z).softmax(1).double()
    divergence = (i * (i / g).log()).sum(1).mean() if kl == "imitate" else (g * (g / i).log()).sum(1).mean()
    expected = -g[torch.arange(8), Fixed.y].log().mean() + divergence
    loss = method.predictor_loss(client, Fixed)
    assert abs(loss.item() - expected.item()) < 1e-5
    assert torch.autograd.grad(loss, client.personal.weight, allow_unused=True) == (None,)


def test_the_local_extractor_is_an_option():
    shared, own = tiny_run("fedcrc"), tiny_run({"name": "fedcrc", "personal_extractor": "local"})
    assert shared.history[-1]["global_accuracy"] == own.history[-1]["global_accuracy"]
    assert [s.loss for s in shared.scores] != [s.loss for s in own.scores]
