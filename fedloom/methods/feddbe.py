"""FedDBE: each client's bias of representations is held in a personal vector, and mean representations agree.

Reference: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedDBE(FedAvg):
    """FedAvg with a personal vector added to representations (PRBM), and a pull of their mean to a common one (MR).

    Global result: the model without the vector. The paper takes the common mean before the first round, from all
    clients, each trained once; here the first round serves for that: its participants send their means, and MR starts
    in the next round.
    """

    paper = "Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023"
    shares = ("model", "mean")
    receives = ("known",)
    keeps = ("prbm",)
    reveals: ClassVar[Mapping[str, str]] = {"mean": "the mean representation of the training samples, in round 1"}
    learns_from = ("labels",)

    kappa: Annotated[float, Field(ge=0)] = 50.0
    """Weight κ of MR: κ/2 times the mean squared difference. The paper: 50 for a small CNN, 1 for ResNet-18."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight μ of a batch in the running mean of representations; 1 takes the batch alone."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, the PRBM, the client's running mean, the common mean, and whether it is known."""
        prbm, mean = nn.ParameterList([torch.zeros(task.features)]), torch.zeros(task.features)
        return {
            "model": task.model(), "prbm": prbm, "running": mean, "mean": mean.clone(), "known": torch.zeros(()),
        }  # fmt: skip

    def update(self, client: Client) -> None:
        """Train the model and the PRBM; in the first round, compute the client's mean representation."""
        client.fit(("model", "prbm"), self.loss)
        if not client.received.known:
            copy_(client.mean, client.features()[0].mean(0))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss with the PRBM, plus MR once the common mean is known."""
        z = client.model.extractor(batch.x)
        mean = (1 - self.momentum) * client.running + self.momentum * z.mean(0)
        copy_(client.running, mean.detach())
        apart = client.received.known * (mean - client.received.mean).square().mean()
        loss: Tensor = client.objective.classify(client.model.head(z + client.prbm[0]), batch.y)
        return loss + self.kappa / 2 * apart

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the models, and in the first round the means."""
        new = server.average(messages)
        if server.state["known"]:
            del new["mean"]
        server.move(new | {"known": torch.ones_like(server.state["known"])})

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return representations with the PRBM added."""
        z: Tensor = client.model.extractor(x) + client.prbm[0]
        return z

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the representations with the PRBM."""
        logits: Tensor = client.model.head(self.represent(client, x))
        return logits
