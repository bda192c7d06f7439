"""FedLC: logits are calibrated by the client's class counts, so that rare and absent classes are not forgotten.

Reference: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.
"""

from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses.class_means import ABSENT
from fedloom.methods.fedavg import FedAvg


class FedLC(FedAvg):
    """FedAvg with cross-entropy on calibrated logits f_c − τ n_c^(−1/4), where n_c are the client's class counts.

    Deviation: the paper's denominator has the other classes only, so that its loss has no minimum; here it has all
    classes, as in cross-entropy. `denominator: others` is the literal reading, which ignores label smoothing.
    """

    paper = "Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022"
    learns_from = ("labels",)

    tau: float = 1.0
    """Strength τ of the calibration; 0 gives FedAvg."""
    denominator: Literal["all", "others"] = "all"
    """Classes in the denominator of the softmax: all, or all but the sample's own."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model and the client's samples per class."""
        return {"model": task.model(), "counts": torch.zeros(task.classes)}

    def update(self, client: Client) -> None:
        """Count the classes, then train the model."""
        copy_(client.counts, client.class_counts)
        super().update(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the cross-entropy of the calibrated logits."""
        logits = client.objective.class_logits(client.model(batch.x))
        logits = logits - self.tau * client.counts.clamp_min(ABSENT) ** -0.25  # of an absent class: −100 τ
        if self.denominator == "all":
            loss: Tensor = client.objective.classify(logits, batch.y)
            return loss
        y = batch.y[:, None]
        return logits.scatter(1, y, -torch.inf).logsumexp(1) - logits.gather(1, y)[:, 0]
