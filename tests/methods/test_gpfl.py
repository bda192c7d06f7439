"""GPFL: one valve makes the global and the personal part of a feature, by the embeddings that the server sent."""

import pytest
import torch
from by_hand import ByHand, Fixed, assert_close_runs, parameters
from tiny import tiny_task
from torch.nn.functional import cosine_similarity, cross_entropy, layer_norm

from fedloom.methods import get
from fedloom.methods.gpfl import GPFL, Valve


class Open(Valve):
    """A valve that changes nothing: features are not negative."""

    def forward(self, z, condition):
        return z


class OnlyHead(GPFL, abstract=True):
    """GPFL with an open valve and the personal loss alone, which is FedPer."""

    def build(self, task):
        return super().build(task) | {"valve": Open(task.features)}

    def loss(self, client, batch):
        return client.objective.classify(self.predict(client, batch.x), batch.y)


def affine(layers, condition):
    hidden = torch.relu(condition @ layers[0].weight.T + layers[0].bias)
    return layer_norm(hidden, hidden.shape, layers[2].weight, layers[2].bias)


@pytest.mark.parametrize("magnitude", ["samples", "batch"])
def test_the_loss_is_that_of_the_paper(magnitude):
    method = get("gpfl", lam=0.3, mu=0.2, magnitude=magnitude)
    client, batch = ByHand(method).at_work(0), Fixed()
    frozen = client.received.embeddings.weight.clone()
    client.embeddings.weight.data.add_(0.5)  # trained since
    client.frequencies.copy_(torch.tensor([0.5, 0.25, 0.25, 0.0]))
    z = client.model.extractor(batch.x)
    parts = []
    for condition in (frozen.mean(0), 0.5 * frozen[0] + 0.25 * frozen[1] + 0.25 * frozen[2]):
        gamma, beta = affine(client.valve.gamma, condition), affine(client.valve.beta, condition)
        parts.append(torch.relu((gamma + 1) * z + beta))
    general, personal = parts
    cosines = cosine_similarity(general[:, None], client.embeddings.weight[None], dim=2)
    apart = (general - frozen[batch.y]).square().sum(1)
    magnitude_loss = apart.sqrt().mean() if magnitude == "samples" else apart.sum().sqrt()
    decay = sum(p.square().sum() for part in (client.valve, client.embeddings) for p in part.parameters())
    expected = cross_entropy(client.model.head(personal), batch.y) + cross_entropy(cosines, batch.y)
    expected = expected + 0.3 * magnitude_loss + 0.1 * decay
    assert method.loss(client, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_with_an_open_valve_and_no_guidance_it_is_fedper():
    same, fedper = ByHand(OnlyHead()), ByHand(get("fedper"))
    for _ in range(2):
        same.round()
        fedper.round()
    assert_close_runs(same, fedper)


def test_extractor_valve_and_embeddings_travel_head_and_frequencies_stay():
    run = ByHand(get("gpfl"), tiny_task())
    start = parameters(run.lane.parts)
    sent = run.round()
    assert {name.split(".")[0] for name in sent[0]} == {"model", "valve", "embeddings"}
    assert not any(name.startswith("model.head") for name in sent[0])
    assert set(run.memories[0]) == {"model.head.weight", "model.head.bias", "frequencies"}
    assert not torch.equal(sent[0]["embeddings.weight"], start["embeddings.weight"])
    labels = run.task.dataset.labels[torch.from_numpy(run.task.samples(0))]
    torch.testing.assert_close(run.memories[0]["frequencies"], labels.bincount(minlength=4) / len(labels))


def test_predictions_follow_the_clients_class_frequencies():
    run = ByHand(get("gpfl"))
    run.round()
    client, x = run.personal(0), Fixed().x
    before = run.method.predict(client, x)
    client.frequencies.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert not torch.allclose(run.method.predict(client, x), before)
