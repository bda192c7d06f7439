"""FedProto: class prototypes travel, weights never do (Tan et al., 2022)."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses.class_means import CLASS_STATISTICS, class_means

NEVER = -1e9


class FedProto(Method):
    """Clients exchange class means of their representations and draw their own towards everybody's.

    Deviations: the paper's average also divides by the number of clients, which would shrink prototypes towards zero;
    we leave that out. The pull is on every sample, as in the authors' code, to which λ = 1 belongs; `distance:
    prototypes` is the paper's formula, and with λ = 1 it diverged for us on Fashion-MNIST (SGD, learning rate 0.05).
    """

    paper = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    shares = ("means", "counts")
    keeps = ("model",)
    by, sums, reveals = {"means": "counts"}, ("counts",), CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    lam: float = 1.0
    """Weight λ of the distance from the global prototypes."""
    distance: Literal["samples", "prototypes"] = "samples"
    """`samples`: mean square distance of each sample, as the authors' code; `prototypes`: Σ ‖mean − prototype‖²."""

    def build(self, task: Task) -> dict[str, Part]:
        """The client's model; prototypes with their counts."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {"model": task.model(), "means": means, "counts": counts}

    def update(self, client: Client) -> None:
        """Local training, then the prototypes of the finished model."""
        client.fit("model", self.loss)
        means, counts = class_means(*client.features(), len(client.counts))
        copy_(client.means, means)
        copy_(client.counts, counts)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy and the pull towards the global prototypes."""
        z = client.model.extractor(batch.x)
        return cross_entropy(client.model.head(z), batch.y) + self.lam * self.pull(client, z, batch.y)

    def pull(self, client: Client, z: Tensor, y: Tensor) -> Tensor:
        """Distance from the prototypes; a class that nobody has sent yet pulls nowhere."""
        known = (client.received.counts > 0)[y]
        if self.distance == "samples":
            return torch.where(known, (z - client.received.means[y]).square().mean(1), 0).mean()
        same = (y[:, None] == y).to(z.dtype)
        members = same.sum(1)
        own = same @ z / members[:, None]  # the batch's mean of the sample's class
        each = torch.where(known, (own - client.received.means[y]).square().sum(1), 0)
        return (each / members).sum()  # every class once

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Nearest known global prototype; while none is known, the client's own classifier."""
        z, known = client.model.extractor(x), client.received.counts > 0
        nearness = -(z[:, None] - client.received.means).square().sum(2)
        return torch.where(known.any(), nearness.masked_fill(~known, NEVER), client.model.head(z))
