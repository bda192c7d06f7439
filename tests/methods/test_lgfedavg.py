"""LG-FedAvg: the head travels, the extractor stays; not the other way round."""

import torch
from by_hand import assert_mean_by_samples
from tiny import tiny_run, tiny_task

from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


def lane_of():
    return Workspace(Setup(tiny_task(norm=True), get("lgfedavg"), Training(batch_size=16), seed=0))


def test_the_head_travels_and_the_extractor_stays():
    run = tiny_run("lgfedavg")
    assert set(run.server.state) == {"model.head.weight", "model.head.bias"}
    assert run.history[0]["up_bytes"] == run.history[0]["down_bytes"] == nbytes(run.server.state)
    lane = lane_of()
    result = perform(lane, Job("update", 1, Message(lane.downward()), client=0))
    assert set(result.message) == {"model.head.weight", "model.head.bias"}
    assert set(result.memory) == {n for n in lane.initial if n.startswith("model.extractor.")}
    assert any("running_mean" in n for n in result.memory)


def test_a_client_goes_on_with_its_own_extractor_under_the_common_head():
    lane = lane_of()
    memory = perform(lane, Job("update", 1, Message(lane.downward()), client=0)).memory
    down = {name: torch.full_like(value, 0.25) for name, value in lane.downward().items()}
    lane.load(down, memory)
    now = lane.parts.named_tensors()
    assert all(torch.equal(now[n], memory[n]) for n in memory)
    assert all(torch.equal(now[n], down[n]) for n in down)


def test_the_head_is_the_average_by_samples():
    lane = lane_of()
    down = Message(lane.downward())
    sent = [perform(lane, Job("update", 1, down, client=c)).message for c in range(6)]
    server = Server(lane, federation=6)
    lane.setup.method.combine(server, iter(sent))
    assert_mean_by_samples(server, sent, "model.head.weight")


def test_the_personal_models_have_other_extractors_and_the_same_head(tmp_path):
    from safetensors.torch import load_file

    run = tiny_run("lgfedavg", out=str(tmp_path / "run"))
    one, other = (load_file(tmp_path / "run" / "models" / f"client-0000{c}.safetensors") for c in (0, 1))
    assert not torch.equal(one["model.extractor.fc1.weight"], other["model.extractor.fc1.weight"])
    assert "model.head.weight" not in one  # nothing personal in it
    assert run.history[-1]["global_accuracy"] is None
