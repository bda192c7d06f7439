"""FedCRL: contrastive learning on shared class representations (Alg. 1)."""

from typing import Literal

import torch
from torch import Tensor, exp
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.state import Part, clamp_, copy_, lerp_
from fedloom.core.task import Task
from fedloom.losses import info_nce
from fedloom.losses.class_means import CLASS_STATISTICS, class_means


class FedCRL(Method):
    """Clients share extractors and class means; each mixes the global extractor into its own as far as it needs it.

    Deviations: class means come from the finished local model in one pass; a client without L_Reg takes the global
    model (literally L_Reg = 0 would ignore it in round 2); "clip" of line 22 is an option, off.
    """

    paper = (
        "Huang et al., FedCRL: Personalized Federated Learning with Contrastive Shared Representations "
        "for Label Heterogeneity in Non-IID Data"
    )
    shares = ("model.extractor", "means", "counts")
    keeps = ("model", "reg")
    by, sums = {"means": "counts"}, ("counts",)  # Eq. 6
    reveals = CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    alpha: float = 1.0
    """Weight of the contrastive loss."""
    tau: float = 0.1
    """Its temperature (τ_CL)."""
    gamma: float = 0.8
    """How quickly a large contrastive loss calls for the global model."""
    reg_over: Literal["mean", "sum"] = "mean"
    """L_Reg in Eq. 7: its mean over the batches of a round, or their sum, with which hardly anything is kept."""
    judged: Literal["trained", "mixed"] = "trained"
    """The personal model: as the client trained it, or after it mixed the next global extractor into it (Eq. 8)."""
    clip_weights: bool = False
    """Line 22 read literally: weights clipped into [0, 1] after every step."""

    def build(self, task: Task) -> dict[str, Part]:
        """φ and π (`model`), class representations with their counts, and the last L_Reg (∞: none yet)."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {"model": task.model(), "means": means, "counts": counts, "reg": torch.tensor(torch.inf)}

    def update(self, client: Client) -> None:
        """Local aggregation, local training, class means."""
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
        """Takes of the global extractor what the client's last L_Reg calls for."""
        share = torch.where(client.reg.isinf(), 0, exp(-self.gamma * client.reg))  # Eq. 7
        lerp_(client.model.extractor, client.received.model.extractor, 1 - share)  # Eq. 8

    def personalise(self, client: Client) -> None:
        """Nothing, or one more mixture."""
        if self.judged == "mixed":
            self.mix(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy (Eq. 10) and the contrast with the global class representations."""
        z = client.model.extractor(batch.x)
        known = client.received.counts > 0  # a class that nobody has sent yet is no negative
        reg = info_nce(z, client.received.means, batch.y, self.tau, known)  # Eq. 12
        client.note("reg", reg)
        client.note("known", known[batch.y].float())
        return cross_entropy(client.model.head(z), batch.y) + self.alpha * reg  # Eq. 13

    def clip(self, client: Client) -> None:
        """Line 22, literally."""
        clamp_(client.model, 0, 1)
