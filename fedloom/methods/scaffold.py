"""SCAFFOLD: control variates correct the drift of local training.

Each client adds c − c_i to its gradients, where c_i estimates its own mean gradient and c that of all clients.

Reference: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.fit import FitResult
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_, inner_product, parameters_of, under
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class SCAFFOLD(FedAvg):
    """FedAvg with local steps along ∇f − c_i + c, the gradient corrected by control variates.

    Steps are plain SGD regardless of the recipe's optimizer: its learning rate is used, momentum and weight decay are
    not. All clients weigh the same in the average.
    """

    paper = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    sends, receives = ("change",), ("control",)
    keeps, serves = ("own_control",), ()
    learns_from = ("labels", "multilabel")

    option: Literal["I", "II"] = "II"
    """New c_i: `I` is the gradient over all local data at the received x; `II` reuses the mean of the local steps."""
    global_lr: float = 1.0
    """Step η_g of the server towards the clients' average; 1 replaces the global model by the average."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, c (`control`), c_i (`own_control`) and c_i⁺ − c_i (`change`); the latter three are zero."""
        model = task.model()
        controls = {
            name: nn.ParameterList(torch.zeros_like(p) for p in model.parameters())
            for name in ("control", "own_control", "change")
        }
        return {"model": model, **controls}

    def update(self, client: Client) -> None:
        """Train the model, then compute the new c_i."""
        if self.option == "I":
            client.steps(self.add_gradient, train="model", epochs=1, purpose="control")
            copy_(client.model, client.received.model)  # the pass has changed batch-norm statistics
        result = client.steps(self.step, train="model")
        self.renew_control(client, result)

    def add_gradient(self, client: Client, batch: Batch) -> None:
        """Add n∇f(x) of the batch to `change`."""
        gradients = torch.autograd.grad(self.loss(client, batch).mean(), parameters_of(client.model))
        with torch.no_grad():
            for total, gradient in zip(parameters_of(client.change), gradients, strict=True):
                total.add_(gradient, alpha=batch.size)

    def step(self, client: Client, batch: Batch) -> None:
        """Update y ← y − η(∇f(y) − c_i + c); the correction is the gradient of a linear term."""
        loss = self.loss(client, batch)
        client.note("loss", loss)
        own, everyone = parameters_of(client.own_control), parameters_of(client.received.control)
        corrections = [c - c_i for c, c_i in zip(everyone, own, strict=True)]
        client.descend("model", loss + inner_product(parameters_of(client.model), corrections), plain=True)

    @torch.no_grad()
    def renew_control(self, client: Client, result: FitResult) -> None:
        """Compute c_i⁺ by option I or II. Without a training step c_i is unchanged."""
        parts = client.own_control, client.received.control, client.change, client.received.model, client.model
        for c_i, c, change, x, y in zip(*map(parameters_of, parts), strict=True):
            if result.steps == 0:
                change.zero_()
            elif self.option == "I":
                change.copy_(change / client.size - c_i)
            else:
                change.copy_((x - y) / (result.steps * result.lr) - c)
            c_i.add_(change)

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Update x ← x + η_g · mean(y − x) and c ← c + Σ(c_i⁺ − c_i)/N, for N clients in the whole federation."""
        sent = server.average(messages, by="uniform", sums=("change",))
        models = {name: value for name, value in sent.items() if under(name, ("model",))}
        server.move(models, {name: self.global_lr for name, _ in server.parts.named_parameters()})
        changes = {"control" + name.removeprefix("change"): sent[name] for name in sent.keys() - models.keys()}
        server.move({name: server.state[name] + total / server.federation for name, total in changes.items()})
