"""FedRoD: the generic model learns from balanced softmax alone, the personal head is added to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import ByHand, Fixed
from tiny import tiny_run, tiny_task
from torch.nn.functional import cross_entropy

from fedloom import objectives
from fedloom.data import Federation
from fedloom.methods import get


def at_work(counts=(3.0, 1.0, 0.0, 9.0)):
    client = ByHand(get("fedrod"), tiny_task(norm=False)).at_work(0)
    client.counts.copy_(torch.tensor(counts))
    client.parts.requires_grad_(True)
    return client


def test_the_generic_loss_is_balanced_softmax():
    client, batch = at_work(), Fixed()
    batch.y = torch.tensor([0, 1, 3, 3, 0, 0, 1, 3])
    logits = client.model(batch.x).double()
    weighted = torch.tensor([3.0, 1.0, 0.0, 9.0]).double() * logits.exp()
    balanced = -(weighted / weighted.sum(1, keepdim=True)).gather(1, batch.y[:, None]).log().mean()
    both = logits + client.personal(client.model.extractor(batch.x))
    expected = balanced + cross_entropy(both, batch.y)
    assert get("fedrod").loss(client, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_the_sum_trains_the_personal_head_only():
    client, batch = at_work((2.0, 2.0, 2.0, 2.0)), Fixed()
    generic = cross_entropy(client.model(batch.x), batch.y)  # equal counts change nothing
    shared = list(client.model.parameters())
    expected = torch.autograd.grad(generic, shared)
    found = torch.autograd.grad(get("fedrod").loss(client, batch), [*shared, *client.personal.parameters()])
    for one, other in zip(expected, found, strict=False):
        torch.testing.assert_close(one, other)
    assert all(gradient.abs().sum() > 0 for gradient in found[len(shared) :])


def test_the_personal_model_is_the_sum_and_the_global_one_the_generic_head():
    run = ByHand(get("fedrod"), tiny_task())
    run.round()
    client, x = run.personal(1), Fixed().x
    run.lane.modes.evaluate_only()
    z = client.model.extractor(x)
    torch.testing.assert_close(run.method.predict(client, x), client.model.head(z) + client.personal(z))
    torch.testing.assert_close(run.method.predict_global(client, x), client.model.head(z))
    assert set(run.memories[1]) == {"personal.weight", "personal.bias"}
    assert not any(name.startswith(("personal", "counts")) for name in run.sent[1])


def test_with_equally_many_samples_of_each_class_the_global_model_is_fedavg_s():
    task = tiny_task(norm=True)
    labels = task.dataset.labels.numpy()
    places = [np.flatnonzero(labels == c) for c in range(4)]
    parts = [np.sort(np.concatenate([place[8 * k : 8 * k + 8] for place in places])) for k in range(2)]
    task = replace(task, federation=Federation(parts, parts))
    fedrod, fedavg = ByHand(get("fedrod"), task), ByHand(get("fedavg"), task)
    for _ in range(2):
        fedrod.round()
        fedavg.round()
    for name, value in fedavg.server.state.items():
        torch.testing.assert_close(fedrod.server.state[name], value, rtol=1e-4, atol=1e-5)


def test_a_class_without_samples_and_label_smoothing_give_a_finite_loss():
    smooth = replace(tiny_task(norm=False), objective=objectives.get("labels", smoothing=0.1))
    run = ByHand(get("fedrod"), smooth)
    sent = run.round([4, 5])  # one class; one sample
    assert all(torch.isfinite(value).all() for message in sent.values() for value in message.values())


def test_there_are_two_results():
    record = tiny_run("fedrod").history[-1]
    assert record["global_accuracy"] is not None
    assert record["personal_accuracy"] is not None
