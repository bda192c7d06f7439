"""FedCP: a policy network divides each sample's feature between a frozen global head and a personal head.

Reference: Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
Policy", KDD 2023.
"""

from copy import deepcopy
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.method import Method
from fedloom.core.state import Part, copy_, lerp_, tensors_of
from fedloom.core.task import Task
from fedloom.losses.precision import in_float32

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


class FedCP(Method):
    """Logits are head_i(r ⊙ z) + head(s ⊙ z), where the policy network computes r and s = 1 − r from z and the client.

    The global head and the global extractor, to which features are aligned, are frozen as received.
    """

    paper = "Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning, KDD 2023"
    shares = ("model.extractor", "head", "policy")
    keeps = ("model.head",)
    has_global = False
    learns_from = ("labels",)

    lam: float = 5.0
    """Weight λ of the alignment with the features of the global extractor."""
    uploads: Literal["personal", "mean"] = "personal"
    """Head that a client sends: its personal one, or the mean of that and the global one (the authors' code)."""
    noise: bool = False
    """Draw the policy by Gumbel softmax in training (the authors' code, which also does so in tests)."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return extractor and personal head (`model`), the global head, the policy network, the client's context."""
        model, k = task.model(), task.features
        policy = nn.Sequential(nn.Linear(k, 2 * k), nn.LayerNorm(2 * k), nn.ReLU())
        return {"model": model, "head": deepcopy(model.head), "policy": policy, "context": torch.zeros(k)}

    def update(self, client: Client) -> None:
        """Train extractor, personal head and policy network together, then set the head to send."""
        self.personalise(client)
        client.fit(("model", "policy"), self.loss)
        copy_(client.head, client.model.head)
        if self.uploads == "mean":
            lerp_(client.head, client.received.head, 0.5)

    def personalise(self, client: Client) -> None:
        """Set the client's context: the sum of its head's weight vectors, normalised."""
        weights = [w for w in tensors_of(client.model.head) if w.dim() == 2]
        copy_(client.context, normalize(reduce(torch.matmul, reversed(weights)).detach().sum(0), dim=0))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss of both heads' sum, plus λ times the distance from the global extractor's features."""
        z = client.model.extractor(batch.x)
        with torch.no_grad():
            reference = client.received.model.extractor(batch.x)
        noise = client.random.uniform(tuple(z.shape), 1e-6, 1 - 1e-6).logit() if self.noise else 0.0
        loss: Tensor = client.objective.classify(self.logits(client, z, noise), batch.y)
        return loss + self.lam * discrepancy(z, reference)

    def logits(self, client: Client, z: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Divide features by the policy, and add both heads' logits."""
        personal, general = client.policy(client.context * z).chunk(2, dim=1)
        r = torch.sigmoid(personal - general + noise)  # softmax of each pair; logistic noise: Gumbel softmax
        logits: Tensor = client.model.head(r * z) + client.received.head((1 - r) * z)
        return logits

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the sum of both heads' logits."""
        return self.logits(client, client.model.extractor(x))


@in_float32
def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples [B, D], summed over Gaussian kernels."""
    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over all pairs of Σ_a exp(−‖x − y‖² / 2a)."""
    squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    return torch.stack([torch.exp(-squares.clamp_min(0) / (2 * a)).mean() for a in BANDWIDTHS]).sum()
