"""Per-FedAvg: meta-learning of an initial model that one gradient step adapts to a client.

Reference: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import inner_product
from fedloom.methods.fedavg import FedAvg


class PerFedAvg(FedAvg):
    """A global model that minimises f(w − α∇f(w)), the loss after one adaptation step; the step personalises it.

    Deviation: the outer step uses the recipe's optimizer, whose learning rate is β (the paper uses plain SGD).
    """

    paper = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
    learns_from = ("labels", "multilabel")

    alpha: float = 0.01
    """Step size α of the adaptation; 0 gives FedAvg's objective."""
    variant: Literal["fo", "hf"] = "fo"
    """`fo` drops the second-order term; `hf` (Hessian-free) approximates it by differences of gradients."""
    delta: float = 0.001
    """Step δ of these differences. It is inaccurate where a ReLU switches within δ; the paper used ELU."""
    adapt_epochs: int = 1
    """Adaptation steps of the personal model; with `adapt_batch`, epochs over the client's data."""
    adapt_batch: int | None = None
    """Batch size of the adaptation; by default all of a client's data."""

    def update(self, client: Client) -> None:
        """Train on independent batches for the inner gradient, the outer gradient and (hf) the Hessian."""
        client.steps(self.step, train="model", batches=3 if self.variant == "hf" else 2)

    def step(self, client: Client, inner: Batch, outer: Batch, curvature: Batch | None = None) -> None:
        """Update w ← w − β (I − α∇²f(w)) ∇f(w − α∇f(w)): the original weights by the gradient at the adapted ones."""
        w = dict(client.model.named_parameters())
        adapted = self.moved(w, self.gradient(client, w, inner), -self.alpha)
        loss = client.objective.at(client.model, adapted, outer)
        gradient = torch.autograd.grad(loss, tuple(adapted.values()))
        if curvature is not None:
            ahead = self.gradient(client, self.moved(w, gradient, self.delta), curvature)
            behind = self.gradient(client, self.moved(w, gradient, -self.delta), curvature)
            slopes = zip(gradient, ahead, behind, strict=True)
            gradient = tuple(g - self.alpha * (a - b) / (2 * self.delta) for g, a, b in slopes)
        client.note("loss", loss)
        client.descend("model", inner_product(w.values(), gradient))  # its gradient with respect to w is `gradient`

    def gradient(self, client: Client, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, ...]:
        """Return ∇f at the given weights."""
        return torch.autograd.grad(client.objective.at(client.model, weights, batch), tuple(weights.values()))

    def moved(self, weights: Mapping[str, Tensor], direction: tuple[Tensor, ...], by: float) -> dict[str, Tensor]:
        """Return weights + by · direction."""
        return {name: w + by * d for (name, w), d in zip(weights.items(), direction, strict=True)}

    def personalise(self, client: Client) -> None:
        """Adapt the global model to the client's data."""
        size = self.adapt_batch or client.size
        client.steps(self.adapt, train="model", epochs=self.adapt_epochs, batch_size=size, purpose="adapt")

    def adapt(self, client: Client, batch: Batch) -> None:
        """Update w ← w − α∇f(w)."""
        client.descend("model", self.loss(client, batch), lr=self.alpha, plain=True)
