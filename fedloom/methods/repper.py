"""RepPer: a shared representation first, then a personal classifier per client (Alg. 1).

Stage 1 trains the extractor with a supervised contrastive loss and FedAvg. In stage 2 each client fits a classifier on
the frozen extractor.

Reference: Jing et al., "A Closer Look at Personalization in Federated Image Classification", arXiv:2204.11841, 2022.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part
from fedloom.core.task import Task
from fedloom.losses import supcon
from fedloom.methods.addons.heads import Headed
from fedloom.objectives import mlp


class RepPer(Headed):
    """Supervised contrastive learning of a shared extractor, then a personal head on the frozen extractor.

    Deviations: Eq. 4 sums over anchors; we average, so that the learning rate does not depend on the batch size. Heads
    are fitted on features scaled to unit root mean square (`scale_features: false` uses them unscaled).
    """

    paper = "Jing et al., A Closer Look at Personalization in Federated Image Classification, arXiv:2204.11841, 2022"
    shares = ("model.extractor", "projection")
    has_global = False
    learns_from = ("labels",)

    tau: float = 0.1
    """Temperature τ of the contrastive loss."""
    positives: Literal["in", "out"] = "in"
    """Mean over positives inside the logarithm (`in`: Eq. 5) or outside (`out`: Khosla et al.'s usual form)."""
    projection: Literal["none", "mlp"] = "none"
    """Projection network under the contrastive loss: none (the paper), or Khosla et al.'s MLP, which is shared too."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, the projection (the identity by default) and the classifiers."""
        width = task.features
        return super().build(task) | {
            "projection": mlp(width, width, 128) if self.projection == "mlp" else nn.Identity()
        }

    def update(self, client: Client) -> None:
        """Train extractor and projection (stage 1)."""
        client.fit(("model.extractor", "projection"), self.loss)  # Eq. 7

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised contrastive loss over two views of each sample: 2B anchors."""
        r = client.projection(client.model.extractor(torch.cat(batch.views)))
        return supcon(normalize(r, dim=1), torch.cat([batch.y, batch.y]), self.tau, self.positives)  # Eq. 5
