"""FedProto: prototypes with counts, no weights; missing classes are masked; the nearest known prototype answers."""

import numpy as np
import pytest
import torch
from by_hand import assert_class_means, update
from tiny import same_state, tiny_run, tiny_task

from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get, hyperparameters, method_class


def lane_of(method="fedproto", epochs=3, **parameters):
    return Workspace(
        Setup(tiny_task(norm=True), get(method, **parameters), Training(batch_size=16, epochs=epochs), seed=0)
    )


def some_prototypes(lane, counts=(5.0, 5.0, 0.0, 5.0)):
    noise = torch.Generator().manual_seed(1)
    return {"means": torch.rand(lane.initial["means"].shape, generator=noise), "counts": torch.tensor(counts)}


def client_in(lane, down):
    lane.load(down, None)
    lane.parts.eval()
    return Client(lane, id=0, round=2, job="update", samples=lane.setup.task.samples(0), first=False)


class Fixed:
    """A batch without class 3."""

    x = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0])


def test_no_weights_travel():
    run = tiny_run("fedproto")
    assert set(run.server.state) == {"means", "counts"}
    lane = lane_of()
    result = update(lane, Message(lane.downward()))
    assert set(result.message) == {"means", "counts"}
    assert set(result.memory) == {n for n in lane.initial if n.startswith("model.")}


def test_prototypes_are_class_means_of_the_finished_model_not_of_all_epochs():
    lane = lane_of(epochs=4)
    sent = update(lane, Message(some_prototypes(lane))).message
    assert_class_means(lane, sent)


def test_the_server_weighs_by_counts_and_keeps_what_nobody_sent():
    lane = lane_of()
    server = Server(lane, federation=6)
    server.state["means"][3], server.state["counts"][3] = 7.0, 2.0
    rng = np.random.default_rng(0)
    means, counts = rng.random((3, 4, 64)), np.array([[1, 0, 5, 0], [3, 0, 0, 0], [2, 4, 1, 0]])
    sent = [
        Message({"means": torch.tensor(m).float(), "counts": torch.tensor(n).float()}, samples=99)
        for m, n in zip(means, counts, strict=True)
    ]
    lane.setup.method.combine(server, iter(sent))
    for c in range(3):
        expected = sum(n[c] * m[c] for m, n in zip(means, counts, strict=True)) / counts[:, c].sum()
        np.testing.assert_allclose(server.state["means"][c].numpy(), expected, rtol=1e-5)
    assert (server.state["means"][3] == 7).all()
    assert server.state["counts"].tolist() == [6, 4, 6, 2]


def test_the_pull_is_the_mean_square_distance_of_samples():
    lane = lane_of()
    down = some_prototypes(lane)
    client = client_in(lane, down)
    z = client.model.extractor(Fixed.x)
    got = lane.setup.method.pull(client, z, Fixed.y).item()
    each = [
        ((row - down["means"][c].double().numpy()) ** 2).mean() if down["counts"][c] > 0 else 0.0
        for row, c in zip(z.detach().double().numpy(), Fixed.y.tolist(), strict=True)
    ]
    assert got == pytest.approx(np.mean(each), rel=1e-5)
    ce = torch.nn.functional.cross_entropy(client.model.head(z), Fixed.y).item()
    assert lane.setup.method.loss(client, Fixed).item() == pytest.approx(ce + np.mean(each), rel=1e-5)


def test_the_literal_distance_is_between_prototypes():
    lane = lane_of(distance="prototypes")
    down = some_prototypes(lane)
    client = client_in(lane, down)
    z = client.model.extractor(Fixed.x)
    got = lane.setup.method.pull(client, z, Fixed.y).item()
    rows, y = z.detach().double().numpy(), Fixed.y.numpy()
    expected = sum(
        ((rows[y == c].mean(0) - down["means"][c].double().numpy()) ** 2).sum() for c in (0, 1)
    )  # 2 is unknown, 3 is not in the batch
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("distance", ["samples", "prototypes"])
def test_a_class_that_nobody_sent_pulls_nowhere(distance):
    lane = lane_of(distance=distance)
    down = some_prototypes(lane)
    far = {"means": down["means"].clone(), "counts": down["counts"]}
    far["means"][2] = 1e3
    one, other = update(lane, Message(down)), update(lane, Message(far))
    assert same_state(one.memory, other.memory)
    nearer = {"means": torch.zeros_like(down["means"]), "counts": down["counts"]}
    assert not same_state(one.memory, update(lane, Message(nearer)).memory)


def test_before_anything_is_known_a_client_trains_as_local_does_bit_for_bit():
    lane, local = lane_of(), lane_of("local")
    assert same_state(update(lane, Message(lane.downward())).memory, update(local, Message({})).memory)


def test_without_pull_clients_train_as_local_bit_for_bit():
    run, local = tiny_run({"name": "fedproto", "lam": 0.0}), tiny_run("local")
    assert [r["loss"] for r in run.history] == [r["loss"] for r in local.history]
    assert [r["loss"] for r in tiny_run("fedproto").history] != [r["loss"] for r in local.history]


def test_the_pull_brings_clients_nearer_to_the_prototypes():
    def apart(lam):
        lane = lane_of(lam=lam, epochs=5)
        down = some_prototypes(lane, (5.0, 5.0, 5.0, 5.0))
        return (update(lane, Message(down)).message["means"] - down["means"]).square().mean().item()

    assert apart(10.0) < apart(1.0) < apart(0.0)


def test_the_nearest_known_prototype_answers():
    lane = lane_of()
    down = some_prototypes(lane)
    client = client_in(lane, down)
    with torch.no_grad():
        z = client.model.extractor(Fixed.x)
        answers = lane.setup.method.predict(client, Fixed.x).argmax(1).tolist()
    known = [0, 1, 3]
    distances = [[((row - down["means"][c]).double() ** 2).sum().item() for c in known] for row in z]
    assert answers == [known[int(np.argmin(d))] for d in distances]
    down["means"][2] = z[0]  # right there, but nobody has sent it
    client = client_in(lane, down)
    assert 2 not in lane.setup.method.predict(client, Fixed.x).argmax(1)


def test_while_no_prototype_is_known_the_own_classifier_answers():
    lane = lane_of()
    client = client_in(lane, lane.downward())
    assert torch.equal(lane.setup.method.predict(client, Fixed.x), client.model(Fixed.x))


def test_the_default_pulls():
    assert hyperparameters(method_class("fedproto"))["lam"] == 1.0
