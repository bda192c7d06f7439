"""FedCRL: class means with counts, loss-wise local aggregation, masks, late joiners."""

import numpy as np
import pytest
import torch
from by_hand import update
from tiny import tiny_run, tiny_task

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.setup import Setup
from fedloom.core.state import snapshot
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


def lane_of(epochs=1, task=None, **parameters):
    return Workspace(
        Setup(task or tiny_task(), get("fedcrl", **parameters), Training(batch_size=16, epochs=epochs), seed=0)
    )


def test_the_class_means_that_travel_are_those_of_the_final_local_model():
    lane = lane_of()
    sent = update(lane, Message(lane.downward())).message
    task = lane.setup.task
    samples = torch.from_numpy(task.samples(0))
    model = lane.parts.model.eval()
    with torch.no_grad():
        z = model.extractor(lane.stored.plain(samples)).numpy()
    y = task.dataset.labels[samples].numpy()
    for c in range(task.classes):
        assert sent["counts"][c] == (y == c).sum()
        if (y == c).any():
            np.testing.assert_allclose(sent["means"][c].numpy(), z[y == c].mean(0), rtol=1e-4, atol=1e-6)


def test_the_server_weighs_class_means_by_counts():
    lane = lane_of()
    down = Message(lane.downward())
    sent = [update(lane, down, client=c).message for c in (0, 1, 4)]
    run = tiny_run("fedcrl", training__rounds=1, training__fraction=1.0)
    counts = run.server.state["counts"]
    assert (
        counts.tolist()
        == np.sum(
            [np.bincount(run.task.dataset.labels[torch.from_numpy(s)], minlength=4) for s in run.task.federation.train],
            0,
        ).tolist()
    )
    weighted = sum(m["means"] * m["counts"][:, None] for m in sent) / sum(m["counts"] for m in sent)[:, None].clamp_min(
        1
    )
    from fedloom.core.server import Server

    server = Server(lane, federation=6)
    mean = server.average(sent, by=get("fedcrl").by, sums=("counts",))
    torch.testing.assert_close(mean["means"], weighted, rtol=1e-5, atol=1e-6)


def test_what_travels_is_the_extractor_means_and_counts():
    lane = lane_of()
    sent = update(lane, Message(lane.downward())).message
    assert all(n.startswith("model.extractor.") or n in ("means", "counts") for n in sent)


def test_without_training_there_is_no_reg_and_the_global_extractor_is_sent_back():
    lane = lane_of(epochs=0)
    down = {n: t + 1 if n.startswith("model") and t.is_floating_point() else t for n, t in lane.downward().items()}
    result = update(lane, Message(down), memory=snapshot(lane.parts, ("model", "reg")))
    assert torch.isinf(result.memory["reg"])
    assert all(torch.equal(result.message[n], down[n]) for n in down if n.startswith("model"))


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_a_client_without_reg_takes_the_global_extractor_whatever_gamma_is(gamma):
    lane = lane_of(epochs=0, gamma=gamma)
    down = {n: t + 1 if n.startswith("model") and t.is_floating_point() else t for n, t in lane.downward().items()}
    sent = update(lane, Message(down), memory=snapshot(lane.parts, ("model", "reg"))).message
    assert torch.equal(sent["model.extractor.fc1.weight"], down["model.extractor.fc1.weight"])


@pytest.mark.parametrize("reg", [0.0, 0.5, 3.0, float("inf")])
def test_the_local_aggregation_is_eq_7_and_8(reg):
    lane = lane_of()
    global_state = {
        n: t + 1 if n.startswith("model") and t.is_floating_point() else t for n, t in lane.downward().items()
    }
    memory = snapshot(lane.parts, ("model", "reg"))
    memory["reg"] = torch.tensor(reg)
    seen = {}

    class Peeking(Client):
        def fit(self, parts, loss, **options):
            seen.update(snapshot(self.parts))
            return super().fit(parts, loss, **options)

    lane.load(global_state, memory)
    client = Peeking(lane, id=0, round=2, job="update", samples=lane.setup.task.samples(0), first=False)
    lane.setup.method.update(client)
    tau = np.exp(-0.8 * reg)
    for name, value in seen.items():
        if name.startswith("model.extractor.") and value.is_floating_point():
            expected = tau * memory[name] + (1 - tau) * global_state[name]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
        elif name.startswith("model.head"):
            assert torch.equal(value, memory[name])


def test_round_one_leaves_reg_unset_and_round_two_sets_it():
    lane = lane_of()
    down = Message(lane.downward())
    first = update(lane, down)
    assert torch.isinf(first.memory["reg"])
    later = update(lane, Message(dict(first.message)), memory=first.memory, round=2)
    assert 0 < later.memory["reg"] < 20


def test_reg_is_the_mean_over_samples_of_known_classes():
    """With one class known, its samples have no negative: InfoNCE is zero, and so is their mean."""
    lane = lane_of()
    down = dict(lane.downward())
    down["counts"] = torch.tensor([5.0, 0, 0, 0])
    down["means"] = torch.randn_like(down["means"])
    result = update(lane, Message(down))
    assert abs(result.memory["reg"].item()) < 1e-6
    down["counts"] = torch.tensor([5.0, 5.0, 0, 0])
    both = update(lane, Message(down)).memory["reg"].item()
    assert both > 0.01


def test_a_class_nobody_has_sent_is_no_negative():
    lane = lane_of()
    down = dict(lane.downward())
    down["counts"] = torch.tensor([5.0, 5.0, 0, 0])
    down["means"] = torch.randn_like(down["means"])
    one = update(lane, Message(down)).message
    down["means"] = down["means"].clone()
    down["means"][2:] = 1e3
    other = update(lane, Message(down)).message
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_what_a_client_mixes_in_after_missed_rounds_is_its_own_last_model_by_its_last_reg():
    """Keeps of round 2 against a global model of round 5: Eq. 8 with the remembered φ_i and L_Reg."""
    lane = lane_of()
    first = update(lane, Message(lane.downward()))
    second = update(lane, Message(dict(first.message)), memory=first.memory, round=2)
    later = {n: t + 1 if n.startswith("model") and t.is_floating_point() else t for n, t in first.message.items()}
    quiet = lane_of(epochs=0)
    sent = update(quiet, Message(later), memory=second.memory, round=5).message
    tau = torch.exp(-0.8 * second.memory["reg"])
    name = "model.extractor.fc1.weight"
    torch.testing.assert_close(sent[name], tau * second.memory[name] + (1 - tau) * later[name], rtol=1e-4, atol=1e-5)


def test_a_class_sent_in_an_earlier_round_stays_known():
    run = tiny_run("fedcrl", training__rounds=1, training__fraction=1.0)
    before = run.server.state["counts"].clone()
    assert (before > 0).all()
    only = Message({"means": torch.ones(4, 64), "counts": torch.tensor([0.0, 3.0, 0.0, 0.0])}, client=4, samples=3)
    get("fedcrl").combine(run.server, iter([only]))
    assert run.server.state["counts"].tolist() == [before[0], 3.0, before[2], before[3]]


def test_clipping_is_an_option_and_off():
    lane = lane_of(clip_weights=True)
    update(lane, Message(lane.downward()))
    assert all(p.min() >= 0 and p.max() <= 1 for p in lane.parts.model.parameters())
    lane = lane_of()
    update(lane, Message(lane.downward()))
    assert any(p.min() < 0 for p in lane.parts.model.parameters())
