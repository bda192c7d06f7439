"""A federation in the open: rounds one by one, with the server, the messages and the memories to look at."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from tiny import tiny_task
from torch import nn

from fedloom import objectives
from fedloom.core.client import Client
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Federation


class ByHand:
    def __init__(self, method, task=None, clients=None, **training):
        self.method, self.task = method, task or tiny_task(norm=False)
        self.clients = list(range(self.task.clients)) if clients is None else clients
        values = {"batch_size": 16, "optimizer": {"lr": 0.05}} | training
        setup = Setup(self.task, method, Training.model_validate(values), seed=3)
        self.lane, home = Workspace(setup), Workspace(setup)
        self.server = Server(home, federation=len(self.clients))
        self.memories, self.sent, self.received, self.rounds = {}, {}, {}, 0

    def round(self, clients=None):
        """One round; returns what was sent up."""
        self.rounds += 1
        self.server.begin(self.rounds)
        chosen = self.clients if clients is None else clients
        self.received = {c: Message(deepcopy(dict(self.method.message_for(self.server, c)))) for c in chosen}
        self.sent = {}
        for c in chosen:
            result = perform(
                self.lane, Job("update", self.rounds, self.received[c], client=c, memory=self.memories.get(c))
            )
            self.memories[c], self.sent[c] = result.memory, result.message
        self.method.combine(self.server, iter(self.sent.values()))
        return self.sent

    def personal(self, client):
        """The client's parts as it is served, personalised."""
        message = Message(self.method.message_for(self.server, client))
        self.lane.load(message, self.memories[client])
        worker = self.at_work(client, job="personalise", load=False)
        self.method.personalise(worker)
        return worker

    def at_work(self, client=0, job="update", load=True, memory=None):
        """A client whose parts are at hand."""
        if load:
            self.lane.load(Message(self.method.message_for(self.server, client)), memory)
        samples = self.task.samples(client)
        return Client(self.lane, id=client, round=max(1, self.rounds), job=job, samples=samples, first=memory is None)


def parameters(part):
    """Named copies of a module's parameters."""
    return {name: p.detach().clone() for name, p in part.named_parameters()}


def perturb(part, scale=0.1, seed=0):
    """Moves a part somewhere else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in part.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))


class Fixed:
    """A batch that can be read again."""

    def __init__(self, size=8, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self.x = torch.rand(size, 1, 8, 8, generator=generator)
        self.y = torch.arange(size) % 4


def even_task(clients=2, samples=16):
    """Clients that all have as many samples."""
    parts = np.split(np.arange(clients * samples), clients)
    return replace(tiny_task(norm=False), federation=Federation(parts, parts))


def watched(method, step, client, read):
    """Updates the client; what each batch of that step (or loss) had in it."""
    seen, original = [], getattr(type(method), step)

    def watch(self, client, batch, seen=seen, read=read, original=original):
        seen.append(read(batch))
        return original(self, client, batch)

    try:
        setattr(type(method), step, watch)
        method.update(client)
    finally:
        setattr(type(method), step, original)
    return seen


def unlabelled(objective="simclr"):
    """The tiny task, to be learnt from views."""
    return replace(tiny_task(norm=False), objective=objectives.get(objective))


class Scalar(nn.Module):
    """One weight."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


class Quadratic:
    """A mixin: client i has f_i(w) = a_i/2 (w − b_i)², whatever its data."""

    a, b = (1.0, 4.0), (0.0, 4.0)

    def build(self, task):
        return super().build(_OneWeight()) | {"a": torch.zeros(()), "b": torch.zeros(())}

    def update(self, client):
        client.a.fill_(self.a[client.id])
        client.b.fill_(self.b[client.id])
        super().update(client)

    def loss(self, client, batch):
        return client.a / 2 * (client.model.w - client.b) ** 2


class _OneWeight:
    def model(self):
        return Scalar()


def update(lane, down, client=0, memory=None, round=1):
    """The result of a client's update in a workspace."""
    return perform(lane, Job("update", round, Message(down), client=client, memory=memory))


def assert_class_means(lane, sent):
    """What client 0 has sent are its counts, and its mean features by the model that is in the workspace."""
    samples = torch.from_numpy(lane.setup.task.samples(0))
    with torch.no_grad():
        z = lane.parts.model.eval().extractor(lane.stored.plain(samples)).double().numpy()
    y = lane.setup.task.dataset.labels[samples].numpy()
    for c in range(4):
        assert sent["counts"][c] == (y == c).sum()
        np.testing.assert_allclose(sent["means"][c].numpy(), z[y == c].mean(0), rtol=1e-4, atol=1e-6)


def assert_mean_by_samples(server, sent, *names):
    """The server has the means of these tensors, weighted by the clients' numbers of samples."""
    for name in names:
        expected = sum(m.samples * m[name].double() for m in sent) / sum(m.samples for m in sent)
        torch.testing.assert_close(server.state[name].double(), expected, rtol=0, atol=1e-6)


def assert_close_runs(run, other):
    """Another run's state of the server and memory of client 1 are those of a run, within rounding."""
    for name, value in other.server.state.items():
        torch.testing.assert_close(run.server.state[name], value)
    for name, value in other.memories[1].items():
        torch.testing.assert_close(run.memories[1][name], value)
