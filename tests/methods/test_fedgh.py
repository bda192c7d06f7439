"""FedGH: the server trains its own head on clients' class means; extractors stay."""

import numpy as np
import pytest
import torch
from by_hand import assert_class_means, update
from tiny import tiny_run, tiny_task

from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.optimizers import OptimizerSettings
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


def lane_of(epochs=2, **parameters):
    training = Training(batch_size=16, epochs=epochs, optimizer=OptimizerSettings(lr=0.1, momentum=0.9))
    return Workspace(Setup(tiny_task(norm=True), get("fedgh", **parameters), training, seed=0))


def server_in(lane):
    """Before any client has worked in the lane: it takes its start from there."""
    server = Server(lane, federation=6)
    server.begin(1)
    return server


def test_class_means_go_up_and_a_head_comes_down():
    run = tiny_run("fedgh")
    assert set(run.server.state) == {"model.head.weight", "model.head.bias"}
    assert run.history[0]["down_bytes"] == nbytes(run.server.state)
    assert run.history[0]["up_bytes"] == 4 * (4 * 64 + 4)
    assert run.history[-1]["global_accuracy"] is None
    lane = lane_of()
    result = update(lane, lane.downward())
    assert set(result.message) == {"means", "counts"}
    assert set(result.memory) == {n for n in lane.initial if n.startswith("model.extractor.")}


def test_class_means_are_those_of_the_finished_model():
    lane = lane_of()
    sent = update(lane, lane.downward()).message
    assert_class_means(lane, sent)


def test_the_servers_head_is_gradient_descent_from_its_own_last_head():
    """NumPy's, on all class means at once: not from any client's head, and without classes that a client lacks."""
    lane = lane_of(server_epochs=3, server_batch=1000)
    server = server_in(lane)
    down = dict(server.state)
    sent = [update(lane, down, client=c).message for c in (0, 1, 4)]  # 4 has one class
    rows = [(m["means"][c].double().numpy(), c) for m in sent for c in range(4) if m["counts"][c] > 0]
    assert len(rows) == 4 + 4 + 1
    z, y = np.stack([row for row, _ in rows]), np.array([c for _, c in rows])
    weight, bias = (down[f"model.head.{n}"].double().numpy().copy() for n in ("weight", "bias"))
    speed = np.zeros_like(weight), np.zeros_like(bias)
    for _ in range(3):
        logits = z @ weight.T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        speed = 0.9 * speed[0] + p.T @ z / len(y), 0.9 * speed[1] + p.sum(0) / len(y)
        weight, bias = weight - 0.1 * speed[0], bias - 0.1 * speed[1]
    lane.setup.method.combine(server, iter(sent))
    state = server.state
    np.testing.assert_allclose(state["model.head.weight"].numpy(), weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["model.head.bias"].numpy(), bias, rtol=1e-4, atol=1e-6)


def test_the_servers_head_is_nobodys_object():
    """Training it leaves what clients hold and what was sent earlier as they were; clients do not write into it."""
    lane = lane_of(personal_head="local")
    server = server_in(lane)
    down = dict(server.state)
    before = {n: t.clone() for n, t in down.items()}
    results = [update(lane, down, client=c) for c in (0, 1)]
    memories = [{n: t.clone() for n, t in r.memory.items()} for r in results]
    assert all(torch.equal(server.state[n], before[n]) for n in before)
    lane.setup.method.combine(server, iter(r.message for r in results))
    for result, memory in zip(results, memories, strict=True):
        assert all(torch.equal(result.memory[n], memory[n]) for n in memory)
        assert not torch.equal(server.state["model.head.weight"], memory["model.head.weight"])
    assert all(torch.equal(down[n], before[n]) for n in before)
    assert not torch.equal(server.state["model.head.weight"], before["model.head.weight"])


def test_class_means_are_taken_one_by_one():
    lane = lane_of()
    sent = [update(lane, lane.downward(), client=c).message for c in (0, 1, 4)]
    counted = []

    class Counting(Server):
        def fit(self, parts, loss, **options):
            result = super().fit(parts, loss, **options)
            counted.append(result.steps)
            return result

    lane.setup.method.combine(Counting(lane, federation=6), iter(sent))
    assert counted == [9]


def test_the_global_head_replaces_the_own_one_before_training():
    lane = lane_of(epochs=0, personal_head="local")
    memory = {n: torch.ones_like(t) for n, t in lane.initial.items() if n.startswith("model.")}
    down = {n: torch.full_like(t, 0.5) for n, t in lane.downward().items()}
    after = update(lane, down, memory=memory, round=2).memory
    assert all(torch.equal(after[n], down[n]) for n in down)
    assert all(torch.equal(after[n], memory[n]) for n in memory if n.startswith("model.extractor."))


@pytest.mark.parametrize("head", ["global", "local"])
def test_which_head_serves_a_client(head):
    lane = lane_of(personal_head=head)
    memory = update(lane, lane.downward()).memory
    down = {n: torch.full_like(t, 0.5) for n, t in lane.downward().items()}
    perform(lane, Job("evaluate", 1, Message(down), client=0, memory=memory))
    serving = lane.parts.named_tensors()["model.head.weight"]
    assert torch.equal(serving, down["model.head.weight"] if head == "global" else memory["model.head.weight"])


def test_extractors_stay_different():
    lane = lane_of()
    one, other = (update(lane, lane.downward(), client=c).memory for c in (0, 1))
    assert not torch.equal(one["model.extractor.fc1.weight"], other["model.extractor.fc1.weight"])
