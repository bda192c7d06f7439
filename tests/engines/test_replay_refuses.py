"""What a CUDA graph could not record is refused on the CPU, with the line that does it."""

from functools import partial

import pytest
import torch
from tiny import tiny_task
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy, dropout

from fedloom.core.client import Client
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.engines.recorded.checks import CaptureError
from fedloom.engines.recorded.lane import Lane, Shared
from fedloom.engines.recorded.tape import Tapes
from fedloom.methods import get

FOREIGN = torch.ones(())


@pytest.fixture
def client():
    setup = Setup(tiny_task(), get("fedavg"), Training(batch_size=16), seed=0)
    (workspace,) = Lane(partial(Workspace, setup), Tapes(), Shared(strict=True)).workspaces
    return Client(workspace, id=0, round=1, job="update", samples=setup.task.samples(0), first=True)


def plain(client, batch):
    return cross_entropy(client.model(batch.x), batch.y)


def reads_the_host(client, batch):
    loss = plain(client, batch)
    return loss * loss.item()


def branches(client, batch):
    loss = plain(client, batch)
    return loss if loss > 0 else -loss


def masks(client, batch):
    return cross_entropy(client.model(batch.x), batch.y, reduction="none")[batch.y > 0].mean()


def reads_foreign_memory(client, batch):
    return plain(client, batch) * FOREIGN


def draws_globally(client, batch):
    return cross_entropy(dropout(client.model(batch.x), 0.5), batch.y)


def lists(client, batch):
    return plain(client, batch) * sum(batch.y.tolist())


def to_numpy(client, batch):
    return plain(client, batch) * float(batch.y.numpy().sum())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lists, r"line \d+, `return plain.*tolist.*in Python"),
        (to_numpy, r"line \d+, `return plain.*numpy.*in Python"),
        (reads_the_host, r"test_replay_refuses.py, line \d+, `return loss \* loss.item\(\)`.*on the host"),
        (branches, r"line \d+, `return loss if loss > 0.*on the host"),
        (masks, r"line \d+, `return cross_entropy.*boolean mask"),
        (reads_foreign_memory, r"line \d+, `return plain\(client, batch\) \* FOREIGN`.*not a part"),
        (draws_globally, r"line \d+, .*uses torch's random generator"),
    ],
)
def test_is_refused_and_the_line_is_named(client, loss, says):
    with pytest.raises(CaptureError, match=says):
        client.fit("model", loss)


def test_reading_the_host_in_the_last_smaller_batch_only_is_refused(client):
    def small(client, batch):
        return plain(client, batch) * (batch.y.sum().item() if batch.size < 16 else 1)

    assert client.size % 16
    with pytest.raises(CaptureError, match=r"batch\.y\.sum\(\)\.item.*on the host"):
        client.fit("model", small, epochs=1)


def test_a_rebound_parameter_is_refused(client):
    client.fit("model", plain)
    client.model.head.weight.data = torch.zeros_like(client.model.head.weight)
    with pytest.raises(CaptureError, match="part 'model.head.weight' was rebound"):
        client.fit("model", plain)


def test_torch_dropout_in_a_network_is_refused(client):
    client._workspace.parts.add_module("extra", nn.Dropout(0.5))

    def dropped(client, batch):
        return cross_entropy(client.extra(client.model(batch.x)), batch.y)

    with pytest.raises(CaptureError, match="uses torch's random generator"):
        client.fit(("model", "extra"), dropped)


def test_a_constant_written_in_the_code_is_fine(client):
    def scaled(client, batch):
        return plain(client, batch) * torch.tensor(2.0)

    assert torch.isfinite(client.fit("model", scaled)["loss"])


def test_a_learning_rate_that_changes_between_rounds_reaches_the_replayed_step(client):
    client.fit("model", plain, lr=0.1)
    start = {name: t.clone() for name, t in client.parts.named_tensors().items()}
    client.fit("model", plain, lr=0.0 + 1e-30)
    after = client.parts.named_tensors()
    assert torch.allclose(start["model.head.weight"], after["model.head.weight"], atol=1e-12)


COMPILER = CompileCounter()


@torch.compile(backend=COMPILER)
def penalty(logits):
    return logits.square().mean()


def with_compiled_penalty(client, batch):
    return plain(client, batch) + penalty(client.model(batch.x))


def test_only_the_compiled_function_of_a_step_is_compiled(client):
    client.fit("model", with_compiled_penalty)
    assert COMPILER.op_count == 2 * COMPILER.frame_count > 0  # torch 2.15 compiles it for each batch size
