"""MOON: local training with a model-contrastive loss.

Representations are drawn towards the global model's and away from the client's previous model's. The base class
`Remembering`, which keeps the previous model, is also that of FedIntR and FedCKA.

Reference: Li et al., "Model-Contrastive Federated Learning", CVPR 2021.
"""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses import model_contrastive
from fedloom.methods.fedavg import FedAvg
from fedloom.models import SplitModel
from fedloom.models.projected import Projected


class Remembering(FedAvg, abstract=True):
    """FedAvg whose clients keep their last local model (`previous`), so that a loss can compare with it."""

    keeps, serves = ("previous",), ()
    learns_from = ("labels", "multilabel")

    def build(self, task: Task) -> dict[str, Part]:
        """Return the network and the client's previous one, initially equal."""
        model = self.equipped(task)
        return {"model": model, "previous": deepcopy(model)}

    def equipped(self, task: Task) -> SplitModel:
        """Return the network with the layers that the method adds to it."""
        return task.model()

    def update(self, client: Client) -> None:
        """Train the model, then keep a copy for the client's next round."""
        client.fit("model", self.loss)
        copy_(client.previous, client.model)


class MOON(Remembering):
    """FedAvg with a model-contrastive loss on a projection of the representation, from which the head also reads."""

    paper = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"

    mu: float = 1.0
    """Weight μ of the contrastive loss; 0 gives FedAvg. The paper tunes it in 0.1–10: 5 on CIFAR-10, 1 elsewhere."""
    tau: float = 0.5
    """Temperature τ of the contrastive loss."""
    width: int = 256
    """Output width of the projection."""
    projection: Literal["below", "side"] = "below"
    """Place of the projection: `below` the classifier (the paper), or at its `side`, unused by it (FedIntR)."""
    similarity: Literal["sample", "batch"] = "sample"
    """`sample` is Eq. 3; `batch` averages the cosine over the batch before the logarithm (FedIntR's code)."""
    judged: Literal["global", "local"] = "global"
    """Personal model to evaluate: the global one, or the client's last local one (which fits FedCRL's figures)."""

    @property
    def serves(self) -> tuple[str, ...]:  # type: ignore[override]
        """The previous local model, with `judged: local`."""
        return ("previous",) if self.judged == "local" else ()

    @property
    def served_by(self) -> str:
        """The part that holds the personal model."""
        return "previous" if self.judged == "local" else "model"

    def equipped(self, task: Task) -> SplitModel:
        """Return the network with its projection."""
        return Projected(task.model(), task.outputs, self.width, side=self.projection == "side")

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy plus μ times the model-contrastive loss."""
        logits, z = client.model.both(batch.x)
        with torch.no_grad():
            _, z_global = client.received.model.both(batch.x)
            _, z_previous = client.previous.both(batch.x)
        contrast = model_contrastive(z, z_global, z_previous, self.tau, self.similarity)  # Eq. 3
        loss: Tensor = client.objective.classify(logits, batch.y)
        return loss + self.mu * contrast  # Eq. 4
