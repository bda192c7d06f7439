"""FedPer: the extractor travels with its buffers, the head stays; also without labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import assert_mean_by_samples
from test_fedstyle import UNSUPERVISED, styled_task
from tiny import same_state, tiny_run, tiny_task, without_labels
from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get
from fedloom.models import Factory, SplitModel
from fedloom.models.base import register


def lane_of(method="fedper", task=None, **parameters):
    return Workspace(Setup(task or tiny_task(norm=True), get(method, **parameters), Training(batch_size=16), seed=0))


@pytest.fixture
def headless():
    """A network that is all extractor."""

    @register("headless")
    class Headless(SplitModel):
        def __init__(self, shape, classes):
            super().__init__()
            wide = shape[0] * shape[1] * shape[2]
            self.features = classes
            self.extractor = nn.Sequential(
                nn.Flatten(), nn.Linear(wide, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes)
            )
            self.head = nn.Identity()

    return replace(tiny_task(), network=Factory("headless"))


def test_with_an_empty_head_it_is_fedavg_bit_for_bit(headless):
    ours, fedavg = tiny_run("fedper", task=headless), tiny_run("fedavg", task=headless)
    assert same_state(ours.server.state, fedavg.server.state)
    # served alike too; one is scored client by client, the other in one batch, where sums round differently
    assert [s.right for s in ours.scores] == [s.right for s in fedavg.scores]
    assert [s.loss for s in ours.scores] == pytest.approx([s.loss for s in fedavg.scores], rel=1e-5)


def test_the_extractor_travels_and_the_head_stays():
    run = tiny_run("fedper")
    assert all(name.startswith("model.extractor.") for name in run.server.state)
    assert run.history[0]["up_bytes"] == run.history[0]["down_bytes"] == nbytes(run.server.state)
    assert run.history[-1]["global_accuracy"] is None
    lane = lane_of()
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert set(result.memory) == {"model.head.weight", "model.head.bias"}
    assert not torch.equal(result.memory["model.head.weight"], lane.initial["model.head.weight"])


def test_batch_norm_buffers_are_averaged_with_the_extractor():
    lane = lane_of()
    down = Message(lane.downward())
    sent = [perform(lane, Job("update", 1, down, client=c)).message for c in range(4)]
    server = Server(lane, federation=6)
    lane.setup.method.combine(server, iter(sent))
    names = ("model.extractor.bn1.running_mean", "model.extractor.bn1.running_var")
    assert_mean_by_samples(server, sent, *names)
    assert not any(torch.equal(server.state[name], lane.initial[name]) for name in names)


def test_a_client_takes_the_common_extractor_and_its_own_head():
    lane = lane_of()
    memory = perform(lane, Job("update", 1, Message(lane.downward()), client=0)).memory
    down = {n: t + 1 for n, t in lane.downward().items()}
    lane.load(down, memory)
    now = lane.parts.named_tensors()
    assert all(torch.equal(now[n], down[n]) for n in down)
    assert all(torch.equal(now[n], memory[n]) for n in memory)


def test_head_and_extractor_are_trained_together():
    """One round of one client is FedAvg's."""
    ours, fedavg = lane_of(), lane_of("fedavg")
    for lane in (ours, fedavg):
        perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert same_state(ours.parts.named_tensors(), fedavg.parts.named_tensors())


def test_the_heads_average_is_a_global_model_if_asked_for_and_changes_nothing_else():
    task = tiny_task()
    task = replace(task, federation=replace(task.federation, newcomers=(1,)))
    plain = tiny_run("fedper", task=task)
    run = tiny_run({"name": "fedper", "average_heads": True}, task=task)
    head = {n: v for n, v in run.server.state.items() if n.startswith("model.head.")}
    assert set(head) == {"model.head.weight", "model.head.bias"}
    assert same_state(plain.server.state, {n: v for n, v in run.server.state.items() if n not in head})
    assert [s.loss for s in plain.scores] == [s.loss for s in run.scores]
    assert run.history[-1]["down_bytes"] == plain.history[-1]["down_bytes"]
    assert run.history[-1]["up_bytes"] == plain.history[-1]["up_bytes"] + nbytes(head)
    assert plain.history[-1]["global_accuracy"] is None and run.history[-1]["global_accuracy"] is not None
    assert run.history[-1]["newcomer_global_accuracy"] is not None
    assert "newcomer_global_accuracy" not in plain.history[-1]


def test_the_averaged_head_is_the_mean_by_samples():
    lane = lane_of(average_heads=True)
    down = Message(lane.downward())
    assert not any(name.startswith("model.head") for name in down)
    sent = [perform(lane, Job("update", 1, down, client=c)).message for c in range(3)]
    server = Server(lane, federation=6)
    lane.setup.method.combine(server, iter(sent))
    assert_mean_by_samples(server, sent, "model.head.bias")
    assert not any(name.startswith("model.head") for name in lane.setup.method.message_for(server, 0))


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lgfedavg"])
def test_there_is_nothing_to_fine_tune_from(method):
    with pytest.raises(UserError, match=f"{method} has no global model, which '\\+ft' needs to start from"):
        get(f"{method}+ft")


@pytest.mark.parametrize(
    ("method", "objective"),
    [(method, objective) for i, objective in enumerate(UNSUPERVISED) for j, method in
     enumerate(["fedper", "fedrep", "lgfedavg"]) if i % 3 != j],
)  # fmt: skip
def test_it_learns_without_labels_through_the_same_objective(method, objective):
    run = tiny_run(method, task=styled_task(), training__rounds=2, training__fraction=1.0, objective=objective)
    assert np.isfinite(run.history[-1]["loss"])
    assert run.history[-1]["personal_accuracy"] > 0.25
    assert run.history[-1]["global_accuracy"] is None
    assert not any(name.startswith("model.target") for name in run.server.state)


@pytest.mark.parametrize("method", ["fedper+probe", "fedrep+probe"])
@pytest.mark.parametrize("objective", UNSUPERVISED)
def test_without_labels_the_projector_stays_and_no_label_is_read(method, objective):
    task = without_labels(styled_task(objective))
    lane = lane_of(method, task)
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert all(name.startswith("model.extractor.") for name in result.message)
    projector = {name for name in lane.initial if name.startswith("model.head.")}
    assert projector and projector <= set(result.memory)
    with pytest.raises(AssertionError, match="a label was read"):
        perform(lane, Job("evaluate", 1, Message(lane.downward()), client=0, memory=result.memory))
