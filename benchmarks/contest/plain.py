"""The plain loop: federated training as common libraries implement it (modelled on PFLlib, November 2025).

A client has a list of (image, label) pairs, normalised floats on the CPU. A DataLoader without workers shuffles them,
collates them one by one and drops the remainder; each batch is moved with `.to(device)`. Each client has an eager model
and a torch.optim.SGD. The server averages parameters by sample counts. torch's flags have their defaults (TF32 in
convolutions, float32 in matrix products). Three simplifications make the loop faster: PFLlib reads a client's file in
every round; SupCon's views are usually made per sample on the CPU (here by fedloom's batched functions on the device);
and if clients are sampled, only the sampled clients have a model.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader

from benchmarks.contest.works import LIGHT, Clock, Work, steps_and_images
from fedloom import Task
from fedloom.core.rng import Dropout
from fedloom.data.augment import parse_augment
from fedloom.losses import layerwise_contrastive, supcon
from fedloom.methods.fedintr import FedIntR
from fedloom.methods.repper import RepPer
from fedloom.models.projected import Tapped

Samples = Any
"""A list of (image, label) pairs, as PFLlib passes to its DataLoader."""


class Client:
    """A FedAvg client."""

    def __init__(self, work: Work, network: nn.Module, samples: Samples, device: str):
        self.device, self.batch, self.samples = device, work.batch, samples
        self.model: Any = deepcopy(network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=work.lr)

    def receive(self, server: nn.Module) -> None:
        for new, old in zip(server.parameters(), self.model.parameters(), strict=True):
            old.data = new.data.clone()

    def train(self) -> list[Tensor]:
        losses = []
        self.model.train()
        for x, y in DataLoader(self.samples, self.batch, drop_last=True, shuffle=True):
            x, y = x.to(self.device), y.to(self.device)
            loss = self.loss(self.prepare(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model(x), y)


class SupConClient(Client):
    """A RepPer client, which uses two views of every image."""

    def __init__(self, work: Work, network: nn.Module, samples: Samples, device: str):
        super().__init__(work, network, samples, device)
        self.draw = parse_augment(LIGHT)
        self.generator = torch.Generator(device) if device != "meta" else torch.Generator()

    def prepare(self, x: Tensor) -> Tensor:
        image = x / 2 + 0.5  # undo the normalisation, since crops pad with black
        return torch.cat([(self.draw(image, self.generator) - 0.5) / 0.5 for _ in range(2)])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return supcon(normalize(self.model.extractor(x), dim=1), torch.cat([y, y]), RepPer.tau)


class FedIntRClient(Client):
    """A FedIntR client, which passes every batch through the received and the previous model too."""

    def __init__(self, work: Work, network: nn.Module, samples: Samples, device: str):
        super().__init__(work, network, samples, device)
        self.previous: Any = deepcopy(network).eval()
        self.received: Any = self.previous

    def receive(self, server: nn.Module) -> None:
        super().receive(server)
        self.received = server.eval()

    def train(self) -> list[Tensor]:
        losses = super().train()
        self.previous = deepcopy(self.model).eval()
        return losses

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, z = self.model.layers(x)
        with torch.no_grad():
            _, z_received = self.received.layers(x)
            _, z_previous = self.previous.layers(x)
        regulariser = layerwise_contrastive(z, z_received, z_previous, FedIntR.tau)
        return cross_entropy(logits, y) + FedIntR.mu * regulariser


CLIENTS: dict[str, type[Client]] = {"fedavg": Client, "repper": SupConClient, "fedintr": FedIntRClient}


def network(work: Work) -> nn.Module:
    """Return the workload's network with the same initial values for all contestants, and with torch's dropout."""
    torch.manual_seed(0)
    model = work.network()
    for module in [*model.modules()]:
        for name, inner in module.named_children():
            if isinstance(inner, Dropout):
                setattr(module, name, nn.Dropout(inner.p))
    return Tapped(model, (), work.shape, FedIntR.width) if work.method == "fedintr" else model


def client_tensors(task: Task, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's normalised images and its labels, on the CPU."""
    index = torch.from_numpy(task.samples(client))
    return task.stored.plain(index), task.dataset.labels[index]


def average(server: nn.Module, clients: list[Client]) -> None:
    """Average parameters by sample counts, one client after another."""
    total = sum(len(client.samples) for client in clients)
    for parameter in server.parameters():
        parameter.data.zero_()
    for client in clients:
        share = len(client.samples) / total
        for mean, parameter in zip(server.parameters(), client.model.parameters(), strict=True):
            mean.data += parameter.data.clone() * share


def run(work: Work, device: str, warmup: int, rounds: int) -> dict[str, Any]:
    """Run and time all rounds."""
    task = work.task()
    draws = work.draws(task, warmup + rounds)
    held = {c: list(zip(*client_tensors(task, c), strict=True)) for drawn in draws for c in drawn}
    clock = Clock(device)
    server = network(work).to(device)
    clients = {c: CLIENTS[work.method](work, server, samples, device) for c, samples in held.items()}
    losses: list[Tensor] = []

    def round(drawn: list[int]) -> None:
        losses.clear()
        chosen = [clients[c] for c in drawn]
        for client in chosen:
            client.receive(server)
        for client in chosen:
            losses.extend(client.train())
        average(server, chosen)

    for drawn in draws[:warmup]:
        round(drawn)
    warm = clock.now() - clock.begin
    seconds = [clock.time(partial(round, drawn)) for drawn in draws[warmup:]]
    steps, images = steps_and_images(task, draws[warmup:], work.batch, drop_last=True)
    return {
        "seconds": seconds,
        "warmup": warm,
        "steps": steps,
        "images": images * work.views,
        "memory": clock.memory(),
        "loss": float(torch.stack(losses).mean()) if losses else None,
    }
