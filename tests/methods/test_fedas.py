"""FedAS: aligned extractors, and an average by Fisher traces."""

import pytest
import torch
from by_hand import ByHand, Fixed, perturb
from tiny import same_state, tiny_task
from torch.nn.functional import cross_entropy

from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.losses.class_means import class_means
from fedloom.methods import get
from fedloom.trust.access import RestrictedMessages
from fedloom.trust.robust import RobustAverage, RobustSettings


def test_without_alignment_a_single_client_is_fedper():
    methods = get("fedas", align_epochs=0), get("fedper")
    same, fedper = (ByHand(method, tiny_task(), clients=[0]) for method in methods)
    for _ in range(3):
        same.round()
        fedper.round()
    for name, value in fedper.server.state.items():
        torch.testing.assert_close(same.server.state[name], value)
    torch.testing.assert_close(same.memories[0]["model.head.weight"], fedper.memories[0]["model.head.weight"])


def test_extractors_are_averaged_by_fisher_traces():
    run = ByHand(get("fedas"), tiny_task())
    sent = run.round([0, 1, 2])
    weights = [sent[c]["fisher"].item() for c in sent]
    assert min(weights) > 0
    for name in ("model.extractor.fc1.weight", "model.extractor.bn1.running_mean"):
        mean = sum(w * sent[c][name].double() for c, w in zip(sent, weights, strict=True)) / sum(weights)
        torch.testing.assert_close(run.server.state[name], mean.float())
    assert not any(name.startswith("fisher") for name in run.server.state)


@pytest.mark.parametrize("rule", [{"rule": "median"}, {"rule": "geometric"}, {"rule": "trimmed", "trim": 0.4}])
def test_a_robust_rule_ignores_the_size_of_traces(rule):
    """Traces count as 1, so that no client can take over the average by a large one."""
    run = ByHand(get("fedas"), tiny_task())
    sent = list(run.round([0, 1, 2]).values())
    combination = RobustAverage(RobustSettings(**rule), run.method, 3)
    server = Server(run.lane, federation=6, combination=combination)
    found = server.average(RestrictedMessages(iter(sent), ""), run.method.shares, by=run.method.by)
    large = [Message(dict(m.items()) | {"fisher": m["fisher"] * 1e6}, samples=m.samples) for m in sent[:1]] + sent[1:]
    again = server.average(RestrictedMessages(iter(large), ""), run.method.shares, by=run.method.by)
    assert same_state(found, again)
    if rule["rule"] == "median":
        name = "model.extractor.fc1.weight"
        torch.testing.assert_close(found[name], torch.stack([m[name] for m in sent]).median(0).values)


@pytest.mark.parametrize("size", [1, 1000])
def test_the_trace_is_the_sum_of_squared_gradients_of_the_finished_model(size):
    run = ByHand(get("fedas", fisher_batch=size), tiny_task(), epochs=2)
    sent = run.round([3])[3]
    samples = torch.from_numpy(run.task.samples(3))
    model = run.lane.parts.model.eval().requires_grad_(True)
    total = 0.0
    for chunk in samples.split(size):
        nll = cross_entropy(model(run.lane.stored.plain(chunk)), run.task.dataset.labels[chunk])
        total += sum(g.square().sum().item() for g in torch.autograd.grad(nll, list(model.parameters())))
    assert sent["fisher"].item() == pytest.approx(total, rel=1e-3)


def test_batch_norm_statistics_do_not_move_after_training():
    run = ByHand(get("fedas"), tiny_task())
    sent = run.round([0])[0]
    steps = -(-len(run.task.samples(0)) // 16)
    assert sent["model.extractor.bn1.num_batches_tracked"] == steps


def test_the_alignment_counts_every_class_once():
    client, batch = ByHand(get("fedas")).at_work(0), Fixed()
    batch.y = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    client.means.copy_(torch.linspace(-1, 1, 4 * 64).view(4, 64))
    z = client.model.extractor(batch.x)
    expected = sum((z[batch.y == c] - client.means[c]).square().mean() for c in (0, 1, 2))
    assert get("fedas").align(client, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_received_extractor_learns_the_class_means_of_the_own_one():
    run = ByHand(get("fedas", align_epochs=20, align_lr=0.05), epochs=0)
    client = run.at_work(0, memory={})
    perturb(client.model.extractor, 0.05)
    means, _ = class_means(*client.features(), 4)
    own = client.model.extractor.fc1.weight.clone()
    received = client.received.model.extractor.fc1.weight.clone()

    def distance(model):
        z, y = client.features(lambda _, x: model.extractor(x))
        return (z - means[y]).square().mean().item()

    before = distance(client.received.model)
    run.method.update(client)
    assert distance(client.model) < 0.8 * before
    now = client.model.extractor.fc1.weight
    assert not torch.equal(now, received)
    assert (now - received).norm() < (now - own).norm()  # it started from the received one


def test_a_first_round_has_no_alignment():
    plain, aligned = ByHand(get("fedas", align_epochs=0)), ByHand(get("fedas", align_epochs=5))
    for rounds in (1, 2):
        plain.round()
        aligned.round()
        name = "model.extractor.fc1.weight"
        assert torch.equal(plain.server.state[name], aligned.server.state[name]) is (rounds == 1)
