import numpy as np
import pytest
import torch
from tiny import same_state, tiny_task
from torch import nn
from torch.nn.functional import cross_entropy

from fedloom.core.batches import shuffled
from fedloom.core.client import Client, StaleValueError
from fedloom.core.optimizers import OptimizerSettings
from fedloom.core.setup import Setup
from fedloom.core.state import copy_, snapshot
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.methods import get


def client_of(task=None, who=0, method="fedavg", **training):
    training = {"batch_size": 16, "optimizer": OptimizerSettings(lr=0.1)} | training
    setup = Setup(task or tiny_task(augment=()), get(method), Training(**training), seed=0)
    lane = Workspace(setup)
    lane.load(snapshot(lane.parts), None)
    return Client(lane, id=who, round=1, job="update", samples=setup.task.samples(who), first=True)


def plain(client, batch):
    return cross_entropy(client.model(batch.x), batch.y)


def test_fit_equals_a_plain_pytorch_loop():
    task = tiny_task(augment=(), norm=False)
    client = client_of(task, optimizer=OptimizerSettings(lr=0.1, momentum=0.9))
    reference = task.model()
    copy_(reference, client.model)
    order = []

    def loss(client, batch):
        order.append(batch._index.clone())
        return plain(client, batch)

    # a closure is refused, so the order comes through a default argument
    def spying(client, batch, order=order):
        order.append(batch._index.clone())
        return plain(client, batch)

    with pytest.raises(StaleValueError, match="closes over order"):
        client.fit("model", loss)
    client.fit("model", spying, epochs=2)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for index in order:
        x = (task.dataset.inputs[index].float() / 255 - 0.5) / 0.5
        optimizer.zero_grad()
        cross_entropy(reference(x), task.dataset.labels[index]).backward()
        optimizer.step()
    for mine, theirs in zip(client.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_every_sample_trains_once_an_epoch_and_no_batch_is_a_single():
    for n in range(1, 70):
        plan = shuffled(np.arange(n) * 3, 16, seed=n)
        rows = list(plan.steps(torch.device("cpu")))
        assert [row[0].item() for row in rows] == plan.keys.tolist()
        assert len(set(plan.keys.tolist())) == len(rows)
        batches = [row[1:] for row in rows]
        assert sorted(torch.cat(batches).tolist()) == [3 * i for i in range(n)]
        assert n == 1 or min(len(b) for b in batches) > 1
        assert max(len(b) for b in batches) <= 17


def test_only_the_fitted_parts_move_buffers_included():
    client = client_of()
    before = snapshot(client.parts)
    client.fit("model.head", plain)
    after = snapshot(client.parts)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"model.head.weight", "model.head.bias"}


def test_a_single_sample_trains_with_batch_norm_in_eval_mode():
    client = client_of(who=5)
    before = snapshot(client.parts)
    result = client.fit("model", plain)
    after = snapshot(client.parts)
    assert result.steps == 1
    assert torch.isfinite(result["loss"])
    running = [name for name in before if "running" in name]
    assert running
    assert all(torch.equal(before[name], after[name]) for name in running)
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])


def test_told_is_the_sample_weighted_mean():
    client = client_of()

    def size(client, batch):
        client.note("size", torch.tensor(float(batch.size)))
        return plain(client, batch)

    result = client.fit("model", size)
    n = client.size
    sizes = [16] * (n // 16) + ([n % 16] if n % 16 else [])
    assert result.steps == len(sizes)
    assert np.isclose(result["size"].item(), sum(s * s for s in sizes) / n)
    assert np.isclose(result.lr.item(), 0.1)


@pytest.mark.parametrize("name", ["id", "round", "size", "first"])
def test_python_values_cannot_be_read_inside_a_step(name):
    client = client_of()
    reads = {
        "id": lambda client, batch: plain(client, batch) * client.id,
        "round": lambda client, batch: plain(client, batch) * client.round,
        "size": lambda client, batch: plain(client, batch) * client.size,
        "first": lambda client, batch: plain(client, batch) * client.first,
    }
    getattr(client, name)
    with pytest.raises(StaleValueError, match="cannot be read inside a training step"):
        client.fit("model", reads[name])


def test_a_fit_inside_a_step_is_refused():
    client = client_of()
    with pytest.raises(RuntimeError, match="cannot be called inside a training step"):
        client.steps(lambda client, batch: client.fit("model", plain), train="model")
    client.fit("model", plain)  # the next one is none


def test_parts_cannot_be_rebound():
    client = client_of()
    with pytest.raises(AttributeError, match="write in place"):
        client.model = None
    with pytest.raises(AttributeError, match=r"client.modell: there is no such part; build\(\) returned: model"):
        _ = client.modell


def test_features_are_those_of_the_extractor_in_eval_mode():
    client = client_of()
    z, y = client.features()
    samples = torch.from_numpy(client._trainer.samples)
    client.parts.eval()
    x = (client._workspace.stored.inputs[samples].float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(z, client.model.extractor(x).detach())
    assert torch.equal(y, client._workspace.stored.labels[samples])


def test_fit_on_features_sees_features():
    client = client_of()
    data = client.features()
    before = snapshot(client.parts)

    def head(client, batch):
        return cross_entropy(client.model.head(batch.x), batch.y)

    first = client.fit("model.head", head, data=data, epochs=1)
    last = client.fit("model.head", head, data=data, epochs=20)
    assert last["loss"] < first["loss"]
    after = snapshot(client.parts)
    assert all(torch.equal(before[k], after[k]) for k in before if not k.startswith("model.head"))


def test_two_batches_of_a_step_are_independent_and_equally_large():
    client = client_of()
    seen = []

    def step(client, first, second, seen=seen):
        seen.append((first._index.clone(), second._index.clone()))
        client.descend("model", plain(client, first))

    result = client.steps(step, train="model", batches=2)
    assert result.steps == len(seen) == -(-client.size // 16)
    assert all(len(a) == len(b) for a, b in seen)
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in seen)


def test_the_optimizer_state_can_be_kept_between_rounds():
    client = client_of(optimizer=OptimizerSettings(lr=0.1, momentum=0.9))
    client.fit("model", plain, keep_optimizer=True)
    kept = client.optimizers
    assert kept
    assert all(name.startswith("optim.plain.model.") for name in kept)
    start = snapshot(client.parts)
    fresh = Client(client._workspace, id=0, round=2, job="update", samples=client._trainer.samples, first=False)
    fresh.fit("model", plain)
    without = snapshot(client.parts)
    client._workspace.load(start, None)
    again = Client(
        client._workspace, id=0, round=2, job="update", samples=client._trainer.samples, first=False, optimizers=kept
    )
    again.fit("model", plain, keep_optimizer=True)
    assert not torch.equal(snapshot(client.parts)["model.head.weight"], without["model.head.weight"])


def test_a_recipe_can_keep_every_optimizer():
    of_method = client_of(optimizer=OptimizerSettings(lr=0.1, momentum=0.9))
    of_method.fit("model", plain, keep_optimizer=True)
    of_recipe = client_of(optimizer=OptimizerSettings(lr=0.1, momentum=0.9, keep=True))
    of_recipe.fit("model", plain)
    assert same_state(of_recipe.optimizers, of_method.optimizers)

    def step(client, batch):
        client.descend("model", plain(client, batch))

    of_recipe.steps(step, train="model")
    assert any(name.startswith("optim.step.model.") for name in of_recipe.optimizers)


def test_randomness_is_keyed_by_seed_round_client_and_use():
    task = tiny_task()

    def weights(who=0, round=1, uses=1, job="update"):
        lane = Workspace(Setup(task, get("fedavg"), Training(batch_size=16), seed=0))
        client = Client(lane, id=who, round=round, job=job, samples=task.samples(0), first=True)
        for _ in range(uses):
            lane.load({}, None)
            client.fit("model", plain)
        return snapshot(lane.parts)["model.head.weight"]

    base = weights()
    assert torch.equal(base, weights())
    for other in (weights(who=1), weights(round=2), weights(job="newcomer"), weights(uses=2)):
        assert not torch.equal(base, other)


def test_no_epochs_do_not_count_as_a_use():
    client, other = client_of(), client_of()
    client.fit("model.head", plain, epochs=0)
    client.fit("model", plain)
    other.fit("model", plain)
    a, b = snapshot(client.parts), snapshot(other.parts)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_small_client_takes_at_least_so_many_steps():
    client = client_of(who=4)  # five samples
    assert client.fit("model", plain, epochs=10, at_least=100).steps == 100
    assert client.fit("model", plain, epochs=10).steps == 10
    assert client.fit("model", plain, epochs=0, at_least=100).steps == 0
    large = client_of()
    batches = -(-large.size // 16)
    assert large.fit("model", plain, epochs=50, at_least=100).steps == 50 * batches


def test_without_a_step_nothing_is_told_whoever_worked_here_before():
    client = client_of()
    assert set(client.fit("model", plain)) == {"loss"}
    assert client.fit("model", plain, epochs=0) == {}


@pytest.mark.parametrize("parts", [(nn.Identity(), nn.Linear(2, 2)), (nn.Linear(2, 2), nn.Identity())])
def test_parts_of_different_structure_are_not_copied(parts):
    with pytest.raises(ValueError, match="argument 2 is (longer|shorter)"):
        copy_(*parts)
