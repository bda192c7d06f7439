"""FedBABU: a head that nobody moves in the federation; then fine-tuning."""

import pytest
import torch
from test_fedcrc import Watched
from tiny import tiny_run, tiny_task

from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get, hyperparameters, method_class


def lane_of(**parameters):
    return Workspace(Setup(tiny_task(norm=True), get("fedbabu", **parameters), Training(batch_size=16), seed=0))


def test_only_the_extractor_is_trained_and_travels():
    lane = lane_of()
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert set(result.message) == {n for n in lane.initial if n.startswith("model.extractor.")}
    assert result.memory == {}
    now = lane.parts.named_tensors()
    assert all(torch.equal(now[n], lane.initial[n]) for n in now if n.startswith("model.head."))
    assert not any(torch.equal(now[n], lane.initial[n]) for n in result.message)


def test_the_global_model_is_the_average_extractor_under_the_common_random_head():
    run = tiny_run("fedbabu")
    assert run.history[0]["up_bytes"] == run.history[0]["down_bytes"] == nbytes(run.server.state)
    parts = run.setup.build()
    for name, tensor in parts.named_tensors().items():
        tensor.data.copy_(run.server.state.get(name, tensor))
    right = total = 0
    parts.eval()
    for test in run.task.federation.test:
        index = torch.from_numpy(test)
        right += (parts.model(run.task.stored.plain(index)).argmax(1) == run.task.dataset.labels[index]).sum().item()
        total += len(index)
    assert run.history[-1]["global_accuracy"] == pytest.approx(right / total)


def test_clients_are_served_by_the_fine_tuned_model_and_the_federation_does_not_notice():
    plain, tuned = tiny_run({"name": "fedbabu", "ft_epochs": 0}), tiny_run("fedbabu")
    assert [r["global_accuracy"] for r in plain.history] == [r["global_accuracy"] for r in tuned.history]
    assert [s.loss for s in plain.scores] != [s.loss for s in tuned.scores]
    assert plain.history[-1]["evaluated"] == tuned.history[0]["evaluated"] == 6  # nobody has to wait


@pytest.mark.parametrize(("what", "parts"), [("all", "model"), ("head", "model.head"), ("body", "model.extractor")])
def test_what_is_fine_tuned_can_be_chosen(what, parts):
    lane = lane_of(ft_parts=what)
    Watched.moved = []
    lane.setup.method.personalise(
        Watched(lane, id=0, round=1, job="personalise", samples=lane.setup.task.samples(0), first=True)
    )
    ((fitted, moved, steps),) = Watched.moved
    assert fitted == parts
    assert moved == {n for n in lane.initial if n.startswith(parts + ".")}
    assert steps == 5 * -(-len(lane.setup.task.samples(0)) // 16)


def test_the_defaults_are_the_papers():
    defaults = hyperparameters(method_class("fedbabu"))
    assert (defaults["ft_epochs"], defaults["ft_parts"]) == (5, "all")


def test_it_fine_tunes_already():
    with pytest.raises(UserError, match=r"fedbabu already does what '\+ft' adds; remove '\+ft' and set the hyper"):
        get("fedbabu+ft")
    with pytest.raises(UserError, match=r"fedstyle already does what '\+probe' adds"):
        get("fedstyle+probe")
