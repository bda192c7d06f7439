"""SCAFFOLD: control variates correct the drift of local training (Karimireddy et al., 2020)."""

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
    """Local steps follow ∇f − c_i + c: the client's gradient, corrected towards everybody's.

    Plain SGD, whatever the recipe's optimizer (its learning rate counts, momentum and weight decay do not); all clients
    weigh alike.
    """

    paper = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    sends, receives = ("change",), ("control",)
    keeps, serves = ("own_control",), ()
    learns_from = ("labels",)

    option: Literal["I", "II"] = "II"
    """What c_i becomes: `I` the gradient of all the client's data at the received x; `II` the mean step, for free."""
    global_lr: float = 1.0
    """How far the server moves towards the clients' average (η_g)."""

    def build(self, task: Task) -> dict[str, Part]:
        """The model, c (`control`), c_i (`own_control`) and c_i⁺ − c_i (`change`); controls start at zero."""
        model = task.model()
        controls = {
            name: nn.ParameterList(torch.zeros_like(p) for p in model.parameters())
            for name in ("control", "own_control", "change")
        }
        return {"model": model, **controls}

    def update(self, client: Client) -> None:
        """Local steps, and the new c_i."""
        if self.option == "I":
            client.steps(self.add_gradient, train="model", epochs=1, purpose="control")
            copy_(client.model, client.received.model)  # batch-norm statistics have moved
        result = client.steps(self.step, train="model")
        self.renew_control(client, result)

    def add_gradient(self, client: Client, batch: Batch) -> None:
        """Sums up n∇f(x) in `change`."""
        gradients = torch.autograd.grad(self.loss(client, batch).mean(), parameters_of(client.model))
        with torch.no_grad():
            for total, gradient in zip(parameters_of(client.change), gradients, strict=True):
                total.add_(gradient, alpha=batch.size)

    def step(self, client: Client, batch: Batch) -> None:
        """y ← y − η(∇f(y) − c_i + c): the correction is the gradient of a linear term."""
        loss = self.loss(client, batch)
        client.note("loss", loss)
        own, everyone = parameters_of(client.own_control), parameters_of(client.received.control)
        corrections = [c - c_i for c, c_i in zip(everyone, own, strict=True)]
        client.descend("model", loss + inner_product(parameters_of(client.model), corrections), plain=True)

    @torch.no_grad()
    def renew_control(self, client: Client, result: FitResult) -> None:
        """c_i⁺, by (I) or (II); without a step c_i stays."""
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
        """x ← x + η_g · mean(y − x); c ← c + Σ(c_i⁺ − c_i)/N, over all N clients that there are."""
        sent = server.average(messages, by="uniform", sums=("change",))
        models = {name: value for name, value in sent.items() if under(name, ("model",))}
        server.move(models, {name: self.global_lr for name, _ in server.parts.named_parameters()})
        changes = {"control" + name.removeprefix("change"): sent[name] for name in sent.keys() - models.keys()}
        server.move({name: server.state[name] + total / server.federation for name, total in changes.items()})
