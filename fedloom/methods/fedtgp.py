"""FedTGP: the server trains global prototypes by contrastive learning with an adaptive margin; no weights travel.

Reference: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.batches import FeatureBatch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part
from fedloom.core.task import Task
from fedloom.losses.class_means import class_means
from fedloom.methods.fedproto import FedProto

TRAINED = "prototypes."


class Prototypes(nn.Module):
    """A vector for each class, and a network that makes its prototype from it."""

    def __init__(self, classes: int, features: int):
        super().__init__()
        self.vectors = nn.Embedding(classes, features)
        self.network = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

    def forward(self) -> Tensor:
        """Return the prototypes [C, D]."""
        prototypes: Tensor = self.network(self.vectors.weight)
        return prototypes


class FedTGP(FedProto):
    """FedProto with global prototypes that the server trains, so that those of different classes stay apart."""

    paper = "Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin Contrastive Learning, AAAI 2024"
    server_keeps = ("prototypes", "margin")

    lam: float = 10.0
    """Weight λ of the distance from the global prototypes; 0 trains local models alone."""
    tau: Annotated[float, Field(ge=0)] = 100.0
    """Upper bound τ of the margin."""
    gap: Literal["nearest", "farthest"] = "nearest"
    """Margin: largest distance of a class from the `nearest` other one (the authors' code), or from the `farthest`."""
    server_epochs: Annotated[int, Field(ge=0)] = 100
    """Epochs in which the server trains the prototypes on a round's class means."""
    server_lr: float | None = None
    """Learning rate of the server; by default the round's."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return FedProto's parts, the trained prototypes and the margin δ."""
        parts = super().build(task)
        return parts | {"prototypes": Prototypes(task.classes, task.features), "margin": torch.zeros(())}

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Train the prototypes; each class mean of each client is one sample."""
        sent = [(message["means"], message["counts"]) for message in messages]
        z = torch.cat([means[counts > 0] for means, counts in sent])
        y = torch.cat([(counts > 0).nonzero()[:, 0] for _, counts in sent])
        total = torch.stack([counts for _, counts in sent]).sum(0)
        server.move({"margin": self.margin(*class_means(z, y, len(total)))})
        server.fit("prototypes", self.contrast, data=(z, y), epochs=self.server_epochs, lr=self.server_lr)
        trained = {n.removeprefix(TRAINED): value for n, value in server.state.items() if n.startswith(TRAINED)}
        means = functional_call(server.parts.get_submodule("prototypes"), trained, ()).detach()
        server.move({"means": means, "counts": torch.where(total > 0, total, server.state["counts"])})

    def margin(self, centres: Tensor, counts: Tensor) -> Tensor:
        """Return δ, the largest gap between the classes' centres, at most τ; 0 for a single class."""
        centres = centres[counts > 0]
        if len(centres) < 2:
            return centres.new_zeros(())
        apart = torch.cdist(centres, centres)
        if self.gap == "nearest":
            apart = apart.fill_diagonal_(torch.inf).amin(1)
        return apart.max().clamp_max(self.tau)

    def contrast(self, server: Client, batch: FeatureBatch) -> Tensor:
        """Return the cross-entropy of negative distances, with the own class's distance enlarged by δ."""
        prototypes = server.prototypes()
        apart = (batch.x[:, None] - prototypes).square().sum(2).clamp_min(1e-12).sqrt()
        own = torch.nn.functional.one_hot(batch.y, len(prototypes))
        return cross_entropy(-(apart + server.margin * own), batch.y)
