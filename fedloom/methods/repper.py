"""RepPer: first a common representation, then a classifier for each (Alg. 1)."""

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
    """Supervised contrastive learning of a shared extractor; then a head per client on it, frozen.

    Deviations: Eq. 4 sums over anchors, we average (the learning rate would depend on the batch size); heads are fitted
    on features of unit root mean square (`scale_features: false` takes them as they are).
    """

    paper = "Jing et al., A Closer Look at Personalization in Federated Image Classification"
    shares = ("model.extractor", "projection")
    has_global = False
    learns_from = ("labels",)

    tau: float = 0.1
    """Temperature of the contrastive loss."""
    positives: Literal["in", "out"] = "in"
    """`in` is Eq. 5 (the mean over positives inside the logarithm); `out` is Khosla's usual form."""
    projection: Literal["none", "mlp"] = "none"
    """The paper has none; `mlp` adds Khosla's, which then travels too (heads still read the representation)."""

    def build(self, task: Task) -> dict[str, Part]:
        """Extractor, projection (nothing, unless asked for) and the classifiers."""
        width = task.features
        return super().build(task) | {
            "projection": mlp(width, width, 128) if self.projection == "mlp" else nn.Identity()
        }

    def update(self, client: Client) -> None:
        """Stage 1, client update."""
        client.fit(("model.extractor", "projection"), self.loss)  # Eq. 7

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Supervised contrastive loss over two views: 2B anchors."""
        r = client.projection(client.model.extractor(torch.cat(batch.views)))
        return supcon(normalize(r, dim=1), torch.cat([batch.y, batch.y]), self.tau, self.positives)  # Eq. 5
