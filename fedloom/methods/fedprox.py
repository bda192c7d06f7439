"""FedProx: FedAvg with a proximal term that keeps local models near the global model.

Reference: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import parameters_of, squared_distance
from fedloom.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with the local objective f(w) + μ/2 ‖w − w_global‖²."""

    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = 0.1
    """Weight μ of the proximal term; 0 gives FedAvg."""
    norm: Literal["squared", "l2"] = "squared"
    """`l2` is the unsquared μ/2 Σ_t ‖w_t − w_t,global‖ over tensors t, which FedIntR compared against."""

    start: Literal["global", "own"] = "global"
    """Model a client starts a round from: the global one, or its own last one (FedStyle's appendix)."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The client's model, with `start: own`."""
        return ("model",) if self.start == "own" else ()

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the local loss plus the proximal term."""
        return super().loss(client, batch) + self.mu / 2 * self.distance(client)

    def distance(self, client: Client) -> Tensor:
        """Return the distance from the received model, over trainable parameters."""
        if self.norm == "squared":
            return squared_distance(client.model, client.received.model)
        pairs = zip(parameters_of(client.model), parameters_of(client.received.model), strict=True)
        return torch.stack([torch.linalg.vector_norm(mine - theirs) for mine, theirs in pairs]).sum()
