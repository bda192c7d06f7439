"""FedIntR: local training is regularised on the representations of intermediate layers (Alg. 1).

Each layer's projection is drawn towards the global model's and away from the client's previous model's. Layers that
are already close to the global model's weigh more.

Reference: Tun et al., "Federated Learning with Intermediate Representation Regularization", BigComp 2023,
arXiv:2210.15827.
"""

from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.task import Task
from fedloom.losses import layerwise_contrastive
from fedloom.methods.moon import Remembering
from fedloom.models import SplitModel
from fedloom.models.projected import Tapped, batch_statistics


class FedIntR(Remembering):
    """FedAvg whose layers are drawn to the global model's and away from the previous local model's."""

    paper = "Tun et al., Federated Learning with Intermediate Representation Regularization, BigComp 2023"

    mu: float = 1.0
    """Weight μ of the regulariser; 0 gives FedAvg. The paper tunes it per dataset in 0.1–10."""
    tau: float = 0.5
    """Temperature τ of the losses and of the layer weights."""
    taps: tuple[str, ...] = ()
    """Layers to regularise, by their names in the model; by default the network's `taps`."""
    width: int = 256
    """Output width of the projection heads."""
    similarity: Literal["sample", "batch"] = "sample"
    """`sample` is Eq. 2; `batch` averages the cosine over the batch before the logarithm (the authors' code)."""
    hidden: Literal["width", "input"] = "width"
    """Hidden width of the heads: `width`, or the layer's (96 → 96 → 256: the CNN's last head in the authors' code)."""
    references: Literal["eval", "train"] = "eval"
    """Batch-norm in the global and previous model: running statistics, or the batch's (`train`; the authors' code)."""
    weights: Literal["softmax", "average"] = "softmax"
    """Layer weights: softmax of the similarities (Eq. 4), or equal (the ablation, Eq. 6)."""

    def equipped(self, task: Task) -> SplitModel:
        """Return the network with its projection heads; the client keeps its last copy (line 11)."""
        return Tapped(task.model(), self.taps, task.shape, self.width, hidden=self.hidden)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy plus μ times the weighted sum over layers."""
        logits, z = client.model.layers(batch.x)
        train = self.references == "train" and batch.size > 1  # a single sample has no variance
        references = (client.received.model, client.previous) if train else ()
        with torch.no_grad(), batch_statistics(*references):
            _, z_global = client.received.model.layers(batch.x)
            _, z_previous = client.previous.layers(batch.x)
        regulariser = layerwise_contrastive(z, z_global, z_previous, self.tau, self.similarity, self.weights)  # Eq. 2–4
        loss: Tensor = client.objective.classify(logits, batch.y)
        return loss + self.mu * regulariser  # Eq. 5
