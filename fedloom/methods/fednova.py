"""FedNova: updates are divided by the clients' numbers of steps, so that longer local training does not weigh more.

Reference: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import nn

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_, parameters_of
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedNova(FedAvg):
    """FedAvg with normalised updates: x ← x + τ_eff Σ p_i d_i, with d_i = (x_i − x)/‖a_i‖₁ and τ_eff = Σ p_i ‖a_i‖₁.

    a_i are the weights with which a client's optimizer adds up its gradients: ‖a_i‖₁ is the number of steps for plain
    SGD, and larger with momentum. It is measured, for any optimizer, as the distance that a number with the constant
    gradient −1 travels; this is η‖a_i‖₁, and η cancels out. With equal numbers of steps the method is FedAvg.
    """

    paper = (
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020"
    )
    shares, sends, receives = (), ("change", "travel"), ("model",)

    def build(self, task: Task) -> dict[str, Part]:
        """Return x (`model`), d_i with the client's batch-norm statistics (`change`), and η‖a_i‖₁ (`travel`)."""
        model = task.model()
        return {"model": model, "change": deepcopy(model), "travel": nn.ParameterList([torch.zeros(())])}

    def update(self, client: Client) -> None:
        """Train the model, then divide its change by the travelled distance. Without steps the change is zero."""
        client.steps(self.step, train=("model", "travel"))
        copy_(client.change, client.model)
        parts = client.change, client.model, client.received.model
        with torch.no_grad():
            for d, y, x in zip(*map(parameters_of, parts), strict=True):
                d.copy_((y - x) / client.travel[0].clamp_min(torch.finfo(y.dtype).tiny))

    def step(self, client: Client, batch: Batch) -> None:
        """Take the same optimizer's step with the model and with `travel`."""
        loss = self.loss(client, batch)
        client.note("loss", loss)
        client.descend("model", loss)
        client.descend("travel", -client.travel[0])

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Update x ← x + τ_eff Σ p_i d_i; batch-norm statistics are averaged."""
        sent = server.average(messages)
        travel = sent.pop("travel.0", torch.zeros(()))
        mean = {"model" + name.removeprefix("change"): value for name, value in sent.items()}
        for name, _ in server.parts.named_parameters():
            if name in mean:
                mean[name] = server.state[name] + travel.to(mean[name]) * mean[name]
        server.move(mean)
