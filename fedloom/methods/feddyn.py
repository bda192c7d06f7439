"""FedDyn: a regulariser that changes in every round, so that local optima agree with the global one.

Each client adds the linear term −⟨g_i, θ⟩, where g_i estimates the gradient of its loss at the common optimum.

Reference: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, inner_product, parameters_of, squared_distance
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedDyn(FedAvg):
    """FedAvg with the local objective f_i(θ) − ⟨g_i, θ⟩ + α/2 ‖θ − θ_global‖², and a corrected average.

    All clients weigh the same, as in the paper's Alg. 1. As α → 0, clients train as in FedAvg; the server still adds
    the sum of earlier mean updates (−h/α), which does not depend on α.
    """

    paper = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    sends, sums = ("present",), ("present",)
    keeps, serves = ("gradient",), ()
    server_keeps = ("h",)

    alpha: Annotated[float, Field(gt=0)] = 0.01
    """Weight α of the regulariser."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return θ (`model`), g_i (`gradient`), h, and a 1 by which the server counts messages (`present`)."""
        model = task.model()
        gradient, h = (nn.ParameterList(torch.zeros_like(p) for p in model.parameters()) for _ in range(2))
        return {"model": model, "gradient": gradient, "h": h, "present": torch.ones(())}

    def update(self, client: Client) -> None:
        """Train the model, then update g_i ← g_i − α(θ_i − θ_global)."""
        super().update(client)
        parts = client.gradient, client.model, client.received.model
        with torch.no_grad():
            for g, theta, received in zip(*map(parameters_of, parts), strict=True):
                g.sub_(self.alpha * (theta - received))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the local loss with the linear and the quadratic term."""
        linear = inner_product(parameters_of(client.model), parameters_of(client.gradient))
        near = squared_distance(client.model, client.received.model)
        return super().loss(client, batch) - linear + self.alpha / 2 * near

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Update h ← h − α/N Σ(θ_i − θ_global) and θ ← mean(θ_i) − h/α; batch-norm statistics are averaged."""
        mean = server.average(messages, by="uniform", sums=self.sums)
        share = mean.pop("present", torch.zeros(())) / server.federation
        for i, (name, _) in enumerate(server.parts.get_submodule("model").named_parameters()):
            if (path := f"model.{name}") in mean:
                mean[f"h.{i}"] = server.state[f"h.{i}"] - self.alpha * share * (mean[path] - server.state[path])
                mean[path] = mean[path] - mean[f"h.{i}"] / self.alpha
        server.move(mean)
