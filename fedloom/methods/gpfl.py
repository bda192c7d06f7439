"""GPFL: class embeddings guide the global part of each feature, a personal head learns from the personal part.

A conditional valve makes both parts from one feature: an affine map whose scale and shift depend on a condition, which
is the mean of all class embeddings (global) or their mean by the client's class frequencies (personal).

Reference: Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning", ICCV 2023.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.state import Part, copy_, inner_product, parameters_of
from fedloom.core.task import Task
from fedloom.losses import info_nce


class Valve(nn.Module):
    """The conditional valve: ReLU((γ + 1) ⊙ z + β), with γ and β computed from a condition."""

    def __init__(self, features: int):
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features)) for _ in range(2)
        )

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        """Return the part of features [B, D] that belongs to a condition [1, D]."""
        return torch.relu((self.gamma(condition) + 1) * z + self.beta(condition))


class GPFL(Method):
    """A shared extractor, valve and class embeddings, with a personal head that reads the personal part of features.

    Conditions are made from the received embeddings. (In the authors' code they are made from those that the client
    itself trained in its last round, before the average, and are zero in the first round.)
    """

    paper = "Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, ICCV 2023"
    shares = ("model.extractor", "valve", "embeddings")
    keeps = ("model.head", "frequencies")
    has_global = False
    learns_from = ("labels",)

    lam: float = 0.01
    """Weight λ of the magnitude loss. The authors: 0.01 for a small CNN, 0.0001 for ResNet-18."""
    mu: float = 0.1
    """Weight decay μ of the valve and the embeddings. The authors: 0.1 for a small CNN, 0 for ResNet-18."""
    magnitude: Literal["samples", "batch"] = "samples"
    """Distance in the magnitude loss: mean over samples, or one norm over the whole batch (the authors' code)."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, the valve, the class embeddings, and the client's class frequencies."""
        model, valve = task.model(), Valve(task.features)
        embeddings, frequencies = nn.Embedding(task.classes, task.features), torch.zeros(task.classes)
        return {"model": model, "valve": valve, "embeddings": embeddings, "frequencies": frequencies}

    def update(self, client: Client) -> None:
        """Train all parts together."""
        copy_(client.frequencies, client.class_counts / client.size)
        client.fit(("model", "valve", "embeddings"), self.loss)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the personal loss, the angle and magnitude losses of the global part, and the weight decay."""
        z, frozen = client.model.extractor(batch.x), client.received.embeddings.weight
        general = client.valve(z, frozen.mean(0, keepdim=True))
        angle = info_nce(general, client.embeddings.weight, batch.y, tau=1.0)
        apart = general - frozen[batch.y]
        magnitude = vector_norm(apart, dim=1).mean() if self.magnitude == "samples" else vector_norm(apart)
        weights = [*parameters_of(client.valve), *parameters_of(client.embeddings)]
        personal: Tensor = client.objective.classify(client.model.head(self.personal(client, z)), batch.y)
        return personal + angle + self.lam * magnitude + self.mu / 2 * inner_product(weights, weights)

    def personal(self, client: Client, z: Tensor) -> Tensor:
        """Return the personal part of features."""
        part: Tensor = client.valve(z, client.frequencies[None] @ client.received.embeddings.weight)
        return part

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return the personal part of the features of inputs."""
        return self.personal(client, client.model.extractor(x))

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the personal part."""
        logits: Tensor = client.model.head(self.represent(client, x))
        return logits
