"""FedIntR: local training regularised on intermediate representations (Alg. 1)."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.task import Task
from fedloom.losses import layerwise_contrastive
from fedloom.methods.moon import Remembering
from fedloom.models import SplitModel
from fedloom.models.projected import Tapped, batch_statistics


class FedIntR(Remembering):
    """FedAvg whose local layers stay near the global model's and move away from the last local model's."""

    paper = "Tun et al., Federated Learning with Intermediate Representation Regularization"

    mu: float = 1.0
    """Weight of the regulariser (the paper tunes it per dataset in 0.1–10)."""
    tau: float = 0.5
    """Temperature."""
    taps: tuple[str, ...] = ()
    """Layers to read, by their names in the model; the model's own taps by default."""
    width: int = 256
    """Width of the projection heads."""
    similarity: Literal["sample", "batch"] = "sample"
    """`sample` is Eq. 2; `batch` averages the cosine over the batch before the logarithm, as the authors' code does."""
    hidden: Literal["width", "input"] = "width"
    """Width inside the projections: `width`, or that of the layer (96 → 96 → 256), as the authors' code has it."""
    references: Literal["eval", "train"] = "eval"
    """Batch-norm of the global and the last local model: their own statistics, or the batch's (authors' code)."""
    weights: Literal["softmax", "average"] = "softmax"
    """Layer weights: Eq. 4, or all alike (the ablation, Eq. 6)."""

    def equipped(self, task: Task) -> SplitModel:
        """The model with its projections; the last local one is remembered (line 11)."""
        return Tapped(task.model(), self.taps, task.shape, self.width, hidden=self.hidden)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy and the weighted sum over layers."""
        logits, z = client.model.layers(batch.x)
        train = self.references == "train" and batch.size > 1  # one sample has no variance
        references = (client.received.model, client.previous) if train else ()
        with torch.no_grad(), batch_statistics(*references):
            _, z_global = client.received.model.layers(batch.x)
            _, z_previous = client.previous.layers(batch.x)
        regulariser = layerwise_contrastive(z, z_global, z_previous, self.tau, self.similarity, self.weights)  # Eq. 2–4
        return cross_entropy(logits, batch.y) + self.mu * regulariser  # Eq. 5
