"""FedCRL: clients share extractors and class representations, and learn contrastively (Alg. 1).

Each client draws its representations towards the global mean of their class. Before training it mixes the global
extractor into its own, the more so the larger its last contrastive loss was.

Reference: Huang et al., "FedCRL: Personalized Federated Learning with Contrastive Shared Representations for Label
Heterogeneity in Non-IID Data", arXiv:2404.17916, 2024.
"""

from typing import Literal

import torch
from torch import Tensor, exp

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.state import Part, clamp_, copy_, lerp_
from fedloom.core.task import Task
from fedloom.losses import info_nce
from fedloom.losses.class_means import CLASS_STATISTICS, class_means


class FedCRL(Method):
    """Shared extractors and class means; each client mixes in the global extractor according to its contrastive loss.

    Deviations: class means are computed in one pass with the trained local model. A client without an L_Reg takes the
    global extractor (read literally, L_Reg = 0 would ignore it in round 2). The clipping of line 22 is an option and
    off by default.
    """

    paper = (
        "Huang et al., FedCRL: Personalized Federated Learning with Contrastive Shared Representations "
        "for Label Heterogeneity in Non-IID Data, arXiv:2404.17916, 2024"
    )
    shares = ("model.extractor", "means", "counts")
    keeps = ("model", "reg")
    by, sums = {"means": "counts"}, ("counts",)  # Eq. 6
    reveals = CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    alpha: float = 1.0
    """Weight α of the contrastive loss."""
    tau: float = 0.1
    """Temperature of the contrastive loss (τ_CL)."""
    gamma: float = 0.8
    """Decay rate γ of the weight exp(−γ L_Reg) of the client's own extractor (Eq. 7); 0 keeps only its own."""
    reg_over: Literal["mean", "sum"] = "mean"
    """L_Reg in Eq. 7 as the mean or the sum over a round's batches. The sum makes the own extractor's weight tiny."""
    judged: Literal["trained", "mixed"] = "trained"
    """Personal model to evaluate: as trained, or with the next global extractor mixed in (Eq. 8)."""
    clip_weights: bool = False
    """Clip the model's weights to [0, 1] after every step: line 22 as printed."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return φ and π (`model`), class means with their counts, and the last L_Reg (∞ if there is none yet)."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {"model": task.model(), "means": means, "counts": counts, "reg": torch.tensor(torch.inf)}

    def update(self, client: Client) -> None:
        """Mix in the global extractor, train the model, then compute class means."""
        self.mix(client)
        result = client.fit("model", self.loss, after=self.clip if self.clip_weights else None)  # Eq. 14
        none = torch.zeros_like(client.reg)
        reg, known = result.get("reg", none), result.get("known", none)
        batches = result.steps if self.reg_over == "sum" else 1
        copy_(client.reg, torch.where(known > 0, batches * reg / known, torch.inf))
        means, counts = class_means(*client.features(), len(client.counts))  # Eq. 3
        copy_(client.means, means)
        copy_(client.counts, counts)

    def mix(self, client: Client) -> None:
        """Mix the global extractor into the client's own, by a weight that depends on its last L_Reg."""
        share = torch.where(client.reg.isinf(), 0, exp(-self.gamma * client.reg))  # Eq. 7
        lerp_(client.model.extractor, client.received.model.extractor, 1 - share)  # Eq. 8

    def personalise(self, client: Client) -> None:
        """Mix in the global extractor once more with `judged: mixed`."""
        if self.judged == "mixed":
            self.mix(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy (Eq. 10) plus the contrastive loss with the global class means."""
        z = client.model.extractor(batch.x)
        known = client.received.counts > 0  # classes that no client has sent yet are not negatives
        reg = info_nce(z, client.received.means, batch.y, self.tau, known)  # Eq. 12
        client.note("reg", reg)
        client.note("known", known[batch.y].float())
        loss: Tensor = client.objective.classify(client.model.head(z), batch.y)
        return loss + self.alpha * reg  # Eq. 13

    def clip(self, client: Client) -> None:
        """Clip all weights to [0, 1] (line 22 as printed)."""
        clamp_(client.model, 0, 1)
