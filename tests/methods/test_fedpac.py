"""FedPAC: statistics of the received extractor, heads mixed for each client, features aligned to centroids."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import assert_class_means, assert_mean_by_samples, update
from test_fedcrc import Watched
from test_simplex import on_a_grid
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.client import Client
from fedloom.core.execution import perform
from fedloom.core.flat_state import nbytes
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get, hyperparameters, method_class
from fedloom.methods.fedpac import collaboration

HEAD = ("model.head.weight", "model.head.bias")


def lane_of(epochs=2, **parameters):
    setup = Setup(tiny_task(norm=True), get("fedpac", **parameters), Training(batch_size=16, epochs=epochs), seed=0)
    return Workspace(setup)


def statistics(z, y, classes):
    """h and V by the definition, class by class."""
    n, h, v = len(y), np.zeros((classes, z.shape[1])), 0.0
    for c in set(y.tolist()):
        of = z[y == c]
        p, mean = len(of) / n, of.mean(0)
        h[c] = p * mean
        v += p * np.mean([row @ row for row in of]) - p**2 * (mean @ mean)
    return h, v / n


def objective(i, h, v):
    """The matrix of client i's program, sum by sum."""
    clients, classes = len(h), len(h[0])
    q = np.diag(v).astype(float)
    for j in range(clients):
        for k in range(clients):
            q[j, k] += sum((h[i][y] - h[j][y]) @ (h[i][y] - h[k][y]) for y in range(classes))
    return q


@pytest.mark.parametrize("client", [0, 1, 4])
def test_statistics_are_those_of_the_received_extractor(client):
    lane = lane_of()
    noise = torch.Generator().manual_seed(0)
    down = {
        n: t + 0.1 * torch.rand(t.shape, generator=noise) if "extractor.fc" in n else t
        for n, t in lane.downward().items()
    }
    sent = update(lane, down, client=client).message
    lane.load(down, None)
    samples = torch.from_numpy(lane.setup.task.samples(client))
    with torch.no_grad():
        z = lane.parts.model.eval().extractor(lane.stored.plain(samples)).double().numpy()
    h, v = statistics(z, lane.setup.task.dataset.labels[samples].numpy(), 4)
    np.testing.assert_allclose(sent["moments"].numpy(), h, rtol=1e-4, atol=1e-6)
    assert sent["variance"].item() == pytest.approx(v, rel=1e-4)


def test_centroids_are_those_of_the_finished_model():
    lane = lane_of()
    sent = update(lane, lane.downward()).message
    assert_class_means(lane, sent)


@pytest.mark.parametrize("seed", range(4))
def test_weights_solve_the_program_of_the_paper(seed):
    rng = np.random.default_rng(seed)
    h, v = rng.normal(size=(3, 4, 5)), rng.uniform(0.5, 20, 3)
    weights = collaboration(h.reshape(3, -1), v)
    for i in range(3):
        q = objective(i, h, v)
        best = on_a_grid(q, 200)
        assert np.abs(weights[i] - best).max() <= 0.02
        assert weights[i] @ q @ weights[i] <= best @ q @ best + 1e-12


def test_noise_alone_spreads_weights_and_bias_alone_keeps_them_at_home():
    same = collaboration(np.ones((3, 8)), np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(same, np.tile(np.array([4, 2, 1]) / 7, (3, 1)), rtol=1e-9)
    apart = collaboration(100 * np.eye(3), np.full(3, 1e-6))
    np.testing.assert_allclose(apart, np.eye(3), atol=1e-6)


def crafted(order):
    """Messages of clients 1, 3, 5, 8 whose statistics pair 1 with 8 and 3 with 5; each head is its client's number."""
    lane = lane_of()
    near = {1: 0.0, 8: 0.1, 3: 5.0, 5: 5.1}
    sent = []
    for client in order:
        state = {n: torch.full_like(lane.initial[n], float(client)) for n in HEAD}
        moments = torch.zeros(4, 64)
        moments[:, 0] = near[client]
        state |= {"moments": moments, "variance": torch.tensor(0.05 * client)}
        state |= {"means": torch.zeros(4, 64), "counts": torch.ones(4)}
        sent.append(Message(state, client=client, samples=10 * client))
    server = Server(lane, federation=9)
    lane.setup.method.combine(server, iter(sent))
    return lane, server, near


@pytest.mark.parametrize("order", [(1, 3, 5, 8), (8, 5, 3, 1), (3, 8, 1, 5)])
def test_weights_are_paired_with_the_heads_they_were_made_for(order):
    _, server, near = crafted(order)
    ids = [5, 1, 8, 3]  # any order: by client, not by place
    h = [np.concatenate([np.full((4, 1), near[c]), np.zeros((4, 63))], 1) for c in ids]
    v = np.array([0.05 * c for c in ids])
    for i, client in enumerate(ids):
        best = on_a_grid(objective(i, h, v), 100)
        expected = sum(w * c for w, c in zip(best, ids, strict=True))
        for name in HEAD:
            assert server.clients[client][name].unique().item() == pytest.approx(expected, abs=0.1)
    assert server.clients[1]["model.head.bias"][0] < server.clients[8]["model.head.bias"][0]
    assert 3 <= server.clients[3]["model.head.bias"][0] <= server.clients[5]["model.head.bias"][0] <= 5


def test_everybody_gets_the_own_mixture_and_a_stranger_the_average():
    lane, server, _ = crafted((1, 3, 5, 8))
    method = lane.setup.method
    for client in (1, 3, 5, 8):
        message = method.message_for(server, client)
        assert message.keys() == lane.downward().keys()
        assert all(torch.equal(message[n], server.clients[client][n]) for n in HEAD)
        assert message["known"] == 1
    stranger = method.message_for(server, 2)
    average = sum(10 * c * c for c in (1, 3, 5, 8)) / sum(10 * c for c in (1, 3, 5, 8))
    assert stranger["model.head.bias"].unique().item() == pytest.approx(average)
    assert stranger["known"] == 0


def test_who_misses_a_round_keeps_the_mixture_of_the_last_one():
    lane, server, _ = crafted((1, 3, 5, 8))
    before = {n: t.clone() for n, t in server.clients[3].items()}
    state = {n: torch.zeros_like(lane.initial[n]) for n in (*HEAD, "moments", "variance", "means", "counts")}
    lane.setup.method.combine(server, iter([Message(state, client=1, samples=5)]))
    assert same_state(server.clients[3], before)
    assert not server.clients[1]["model.head.weight"].any()


def test_without_alignment_and_with_one_client_it_is_fedrep_bit_for_bit():
    task = tiny_task()
    federation = replace(task.federation, train=task.federation.train[:1], test=task.federation.test[:1])
    task = replace(task, federation=federation)
    ours = tiny_run({"name": "fedpac", "lam": 0.0}, task=task, training__epochs=2)
    fedrep = tiny_run({"name": "fedrep", "personal_epochs": 1}, task=task, training__epochs=2)
    extractor = {n: v for n, v in ours.server.state.items() if n.startswith("model.extractor.")}
    assert same_state(extractor, fedrep.server.state)
    assert [s.loss for s in ours.scores] == [s.loss for s in fedrep.scores]
    for name in ("loss", "personal_accuracy"):
        assert [r[name] for r in ours.history] == [r[name] for r in fedrep.history]
    aligned = tiny_run("fedpac", task=task, training__epochs=2)
    assert [s.loss for s in aligned.scores] != [s.loss for s in ours.scores]


def test_the_head_first_then_the_extractor_each_with_the_other_frozen():
    lane = lane_of(epochs=3)
    Watched.moved = []
    lane.setup.method.update(Watched(lane, id=0, round=1, job="update", samples=lane.setup.task.samples(0), first=True))
    (first, h, steps), (second, f, more) = Watched.moved
    assert (first, second) == ("model.head", "model.extractor")
    assert h == set(HEAD)
    assert f == {n for n in lane.initial if n.startswith("model.extractor.")}
    assert more == 3 * steps


class Fixed:
    x = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0])


def test_the_alignment_is_the_mean_square_distance_from_known_centroids():
    lane = lane_of(lam=0.7)
    down = dict(lane.downward()) | {"means": torch.rand(4, 64), "counts": torch.tensor([5.0, 5.0, 0.0, 5.0])}
    lane.load(down, None)
    lane.parts.eval()
    client = Client(lane, id=0, round=2, job="update", samples=lane.setup.task.samples(0), first=False)
    z = client.model.extractor(Fixed.x)
    ce = torch.nn.functional.cross_entropy(client.model.head(z), Fixed.y).item()
    each = [
        ((row - down["means"][c].double().numpy()) ** 2).mean() if down["counts"][c] > 0 else 0.0
        for row, c in zip(z.detach().double().numpy(), Fixed.y.tolist(), strict=True)
    ]
    assert lane.setup.method.loss(client, Fixed).item() == pytest.approx(ce + 0.7 * np.mean(each), rel=1e-5)


def test_alignment_begins_in_round_two():
    lane, loose = lane_of(), lane_of(lam=0.0)
    assert same_state(update(lane, lane.downward()).message.tensors, update(loose, loose.downward()).message.tensors)
    down = dict(lane.downward()) | {"means": torch.rand(4, 64), "counts": torch.ones(4)}
    one, other = update(lane, down, round=2).message, update(loose, down, round=2).message
    assert not torch.equal(one["model.extractor.fc1.weight"], other["model.extractor.fc1.weight"])
    assert torch.equal(one["model.head.weight"], other["model.head.weight"])  # trained before, without it


def test_a_client_trains_the_mixture_it_was_sent():
    lane = lane_of(personal_epochs=0)
    memory = {n: torch.ones_like(lane.initial[n]) for n in HEAD}
    down = dict(lane.downward()) | {n: torch.full_like(lane.initial[n], 0.5) for n in HEAD}
    assert all(torch.equal(update(lane, down, memory=memory, round=2).message[n], down[n]) for n in HEAD)


def test_the_mixture_serves_whom_the_server_knows_and_a_trained_head_a_stranger():
    lane = lane_of()
    memory = update(lane, lane.downward()).memory
    mixed = dict(lane.downward()) | {n: torch.full_like(lane.initial[n], 0.5) for n in HEAD}
    perform(lane, Job("evaluate", 2, Message(mixed | {"known": torch.ones(())}), client=0, memory=memory))
    assert (lane.parts.named_tensors()["model.head.weight"] == 0.5).all()
    perform(lane, Job("evaluate", 2, Message(mixed), client=1))
    head = lane.parts.named_tensors()["model.head.weight"]
    assert not torch.equal(head, mixed["model.head.weight"]) and not torch.equal(
        head, lane.initial["model.head.weight"]
    )


def test_batch_norm_buffers_and_centroids_are_averaged():
    lane = lane_of()
    sent = [update(lane, lane.downward(), client=c).message for c in range(4)]
    server = Server(lane, federation=6)
    lane.setup.method.combine(server, iter(sent))
    assert_mean_by_samples(server, sent, "model.extractor.bn1.running_mean")
    weighted = sum(m["counts"][:, None] * m["means"] for m in sent) / sum(m["counts"] for m in sent)[:, None]
    torch.testing.assert_close(server.state["means"], weighted, rtol=1e-5, atol=1e-6)
    assert "moments" not in server.state and "variance" not in server.state


def test_what_travels():
    run = tiny_run("fedpac")
    assert set(run.server.state) == {n for n in run.setup.build().named_tensors() if n not in ("moments", "variance")}
    down = nbytes(run.server.state)
    assert run.history[0]["down_bytes"] == down
    assert run.history[0]["up_bytes"] == down - 4 + 4 * (4 * 64 + 1)  # `known` comes down only
    assert run.history[-1]["global_accuracy"] is None


def test_the_defaults_are_the_papers():
    defaults = hyperparameters(method_class("fedpac"))
    assert (defaults["lam"], defaults["personal_epochs"]) == (1.0, 1)
