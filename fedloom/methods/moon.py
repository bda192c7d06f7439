"""FedAvg whose clients remember their last local model: what MOON, FedIntR and FedCKA have in common."""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses import model_contrastive
from fedloom.methods.fedavg import FedAvg
from fedloom.models import SplitModel
from fedloom.models.projected import Projected


class Remembering(FedAvg, abstract=True):
    """A loss may compare the model in training with the received one and with `previous`; none of them is served."""

    keeps, serves = ("previous",), ()
    learns_from = ("labels",)

    def build(self, task: Task) -> dict[str, Part]:
        """The network, and the client's last one; the first time that is the common start."""
        model = self.equipped(task)
        return {"model": model, "previous": deepcopy(model)}

    def equipped(self, task: Task) -> SplitModel:
        """The network with what the method puts on it."""
        return task.model()

    def update(self, client: Client) -> None:
        """Trains, then remembers the local model for the next time."""
        client.fit("model", self.loss)
        copy_(client.previous, client.model)


class MOON(Remembering):
    """FedAvg with a model-contrastive loss on a projection of the representation; the classifier reads the projection.

    With μ = 0 it is FedAvg on that network.
    """

    paper = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"

    mu: float = 1.0
    """Weight of the contrastive loss (the paper tunes it in 0.1–10: 5 on CIFAR-10, 1 elsewhere)."""
    tau: float = 0.5
    """Temperature."""
    width: int = 256
    """Width of the projection."""
    projection: Literal["below", "side"] = "below"
    """`below` the classifier, as in the paper; or at its `side`, where the classifier does not see it (FedIntR's)."""
    similarity: Literal["sample", "batch"] = "sample"
    """`sample` is Eq. 3; `batch` averages the cosine over the batch before the logarithm, as FedIntR's code does."""
    judged: Literal["global", "local"] = "global"
    """The personal model: the shared one, or the client's own after its last training (FedCRL's figures fit that)."""

    @property
    def serves(self) -> tuple[str, ...]:  # type: ignore[override]
        """Where local models are judged, the last one is the client's own."""
        return ("previous",) if self.judged == "local" else ()

    @property
    def served_by(self) -> str:
        """The model that is judged."""
        return "previous" if self.judged == "local" else "model"

    def equipped(self, task: Task) -> SplitModel:
        """The network with its projection."""
        return Projected(task.model(), task.classes, self.width, side=self.projection == "side")

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy and the model-contrastive term."""
        logits, z = client.model.both(batch.x)
        with torch.no_grad():
            _, z_global = client.received.model.both(batch.x)
            _, z_previous = client.previous.both(batch.x)
        contrast = model_contrastive(z, z_global, z_previous, self.tau, self.similarity)  # Eq. 3
        return cross_entropy(logits, batch.y) + self.mu * contrast  # Eq. 4
