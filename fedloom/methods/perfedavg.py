"""Per-FedAvg: an initial model that a gradient step makes personal (Fallah et al., 2020)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import inner_product
from fedloom.methods.fedavg import FedAvg


class PerFedAvg(FedAvg):
    """Minimises f(w − α∇f(w)), the loss after one step of adaptation; that step makes the personal model.

    Deviation: the outer step is the recipe's optimizer's, with β its learning rate (the paper's is plain SGD).
    """

    paper = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
    learns_from = ("labels",)

    alpha: float = 0.01
    """Step size of an adaptation (α)."""
    variant: Literal["fo", "hf"] = "fo"
    """`fo` is first order; `hf` (Hessian-free) keeps the second-order term, by differences of gradients."""
    delta: float = 0.001
    """Width of these differences (δ). Where a ReLU switches within it the difference jumps: the paper used ELU."""
    adapt_epochs: int = 1
    """Adaptation steps that make the personal model; passes over the client's data if `adapt_batch` is given."""
    adapt_batch: int | None = None
    """Samples of such a step; all of a client's data at once if not given."""

    def update(self, client: Client) -> None:
        """Each step has batches of its own for the inner gradient, the outer one and (hf) the Hessian."""
        client.steps(self.step, train="model", batches=3 if self.variant == "hf" else 2)

    def step(self, client: Client, inner: Batch, outer: Batch, curvature: Batch | None = None) -> None:
        """w ← w − β (I − α∇²f(w)) ∇f(w − α∇f(w)): the gradient at the adapted weights moves the original ones."""
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
        client.descend("model", inner_product(w.values(), gradient))  # whose gradient in w is that one

    def gradient(self, client: Client, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, ...]:
        """∇f at these weights."""
        return torch.autograd.grad(client.objective.at(client.model, weights, batch), tuple(weights.values()))

    def moved(self, weights: Mapping[str, Tensor], direction: tuple[Tensor, ...], by: float) -> dict[str, Tensor]:
        """weights + by · direction."""
        return {name: w + by * d for (name, w), d in zip(weights.items(), direction, strict=True)}

    def personalise(self, client: Client) -> None:
        """The adaptation, on the client's own data."""
        size = self.adapt_batch or client.size
        client.steps(self.adapt, train="model", epochs=self.adapt_epochs, batch_size=size, purpose="adapt")

    def adapt(self, client: Client, batch: Batch) -> None:
        """w ← w − α∇f(w)."""
        client.descend("model", self.loss(client, batch), lr=self.alpha, plain=True)
