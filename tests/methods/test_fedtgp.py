"""FedTGP: the server trains prototypes with a margin; clients are FedProto's."""

import pytest
import torch
from by_hand import ByHand
from tiny import same_state, tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.methods import get


def sent_by(run):
    sent = run.sent.values()
    rows = [(m["means"][c], c) for m in sent for c in range(4) if m["counts"][c] > 0]
    return torch.stack([mean for mean, _ in rows]), torch.tensor([c for _, c in rows])


def test_with_lambda_zero_clients_are_those_of_fedproto_and_of_local():
    runs = [ByHand(get(name, lam=0.0), tiny_task()) for name in ("fedtgp", "fedproto")]
    local = ByHand(get("local"), tiny_task())
    for _ in range(2):
        for run in (*runs, local):
            run.round()
    for client in range(6):
        assert same_state(runs[0].memories[client], runs[1].memories[client])
        assert same_state(runs[0].memories[client], local.memories[client])


def test_the_first_round_is_that_of_fedproto():
    runs = [ByHand(get(name), tiny_task()) for name in ("fedtgp", "fedproto")]
    sent = [run.round() for run in runs]
    assert all(same_state(dict(sent[0][c].items()), dict(sent[1][c].items())) for c in sent[0])


@pytest.mark.parametrize("gap", ["nearest", "farthest"])
def test_the_margin_is_the_largest_gap_between_centres(gap):
    run = ByHand(get("fedtgp", gap=gap, server_epochs=0))
    run.round([0, 1, 4])
    z, y = sent_by(run)
    centres = [z[y == c].mean(0) for c in range(4)]
    gaps = [[(a - b).norm() for b in centres if b is not a] for a in centres]
    expected = max(min(row) if gap == "nearest" else max(row) for row in gaps)
    torch.testing.assert_close(run.server.state["margin"], expected)
    bounded = ByHand(get("fedtgp", tau=1e-3, server_epochs=0))
    bounded.round([0, 1])
    assert bounded.server.state["margin"].item() == pytest.approx(1e-3)


def test_a_single_class_has_no_margin_and_gives_finite_prototypes():
    run = ByHand(get("fedtgp", server_epochs=3))
    run.round([4])
    assert run.server.state["margin"] == 0
    assert torch.isfinite(run.server.state["means"]).all()
    assert (run.server.state["counts"] > 0).tolist() == [False, False, True, False]


def test_the_server_takes_gradient_steps_on_the_contrast():
    """Two steps on all class means at once, by autograd on a plain formula."""
    run = ByHand(get("fedtgp", server_epochs=2, server_lr=0.3), batch_size=1000)
    names = ("vectors.weight", "network.0.weight", "network.0.bias", "network.2.weight", "network.2.bias")
    p = [run.server.state[f"prototypes.{name}"].clone().requires_grad_(True) for name in names]
    run.round([0, 1, 4])
    z, y = sent_by(run)
    margin = run.server.state["margin"]

    def prototypes():
        return torch.relu(p[0] @ p[1].T + p[2]) @ p[3].T + p[4]

    for _ in range(2):
        apart = torch.stack([(z - prototype).norm(dim=1) for prototype in prototypes()], 1)
        apart = apart + margin * torch.eye(4)[y]
        for value, gradient in zip(p, torch.autograd.grad(cross_entropy(-apart, y), p), strict=True):
            value.data -= 0.3 * gradient
    for name, value in zip(names, p, strict=True):
        torch.testing.assert_close(run.server.state[f"prototypes.{name}"], value.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.server.state["means"], prototypes().detach(), rtol=1e-4, atol=1e-5)


def test_only_prototypes_travel_and_the_network_stays_at_the_server():
    run = ByHand(get("fedtgp", server_epochs=3), tiny_task())
    sent = run.round()
    assert set(sent[0]) == set(run.received[0]) == {"means", "counts"}
    assert {name.split(".")[0] for name in run.server.state} == {"means", "counts", "prototypes", "margin"}
    again = tiny_run("fedtgp")
    assert again.history[-1]["global_accuracy"] is None
    assert again.history[0]["up_bytes"] == 4 * (4 * 64 + 4)
