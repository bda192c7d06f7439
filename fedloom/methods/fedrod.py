"""FedRoD: a generic head trained with a balanced loss, and a personal head that is added to it.

Reference: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
"""

from copy import deepcopy

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses.class_means import ABSENT
from fedloom.methods.fedavg import FedAvg


class FedRoD(FedAvg):
    """A generic model trained with balanced softmax, and a personal head whose logits are added to the generic ones.

    The extractor and the generic head learn from the balanced loss only, the personal head from the loss of the sum.
    Global result: the generic model (`model`). Personal result: the sum of both heads. The personal head is linear; the
    paper's variant that generates it by a hypernetwork is not included.
    """

    paper = "Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022"
    keeps = ("personal",)
    learns_from = ("labels",)

    def build(self, task: Task) -> dict[str, Part]:
        """Return extractor and generic head (`model`), the personal head, and the client's samples per class."""
        model = task.model()
        return {"model": model, "personal": deepcopy(model.head), "counts": torch.zeros(task.classes)}

    def update(self, client: Client) -> None:
        """Train extractor and both heads together."""
        copy_(client.counts, client.class_counts)
        client.fit(("model", "personal"), self.loss)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the balanced loss of the generic logits plus the loss of the sum, which trains the personal head."""
        z = client.model.extractor(batch.x)
        generic = client.model.head(z)
        total = generic.detach() + client.personal(z.detach())
        prior = client.counts.clamp_min(ABSENT).log()  # balanced softmax: p(c) ∝ n_c exp(logit_c)
        balanced: Tensor = client.objective.classify(client.objective.class_logits(generic) + prior, batch.y)
        personal: Tensor = client.objective.classify(total, batch.y)
        return balanced + personal

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the sum of the generic and the personal logits."""
        z = client.model.extractor(x)
        logits: Tensor = client.model.head(z) + client.personal(z)
        return logits
