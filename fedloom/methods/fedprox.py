"""FedAvg with a proximal term that holds local models near the global one (Li et al., 2020)."""

from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import parameters_of, squared_distance
from fedloom.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """min f(w) + μ/2 ‖w − w_global‖². With μ = 0 it is FedAvg."""

    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = 0.1
    """Strength of the pull towards the global model."""
    norm: Literal["squared", "l2"] = "squared"
    """`l2` is μ/2 Σ ‖w_t − w_t,global‖ over tensors, unsquared: what FedIntR compared against."""

    start: Literal["global", "own"] = "global"
    """`own`: a client goes on from its own model, as FedStyle's appendix has it, and keeps that."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """Its own model, where it starts from it."""
        return ("model",) if self.start == "own" else ()

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Local loss and proximal term."""
        return super().loss(client, batch) + self.mu / 2 * self.distance(client)

    def distance(self, client: Client) -> Tensor:
        """From the received model, over trainable parameters."""
        if self.norm == "squared":
            return squared_distance(client.model, client.received.model)
        pairs = zip(parameters_of(client.model), parameters_of(client.received.model), strict=True)
        return torch.stack([torch.linalg.vector_norm(mine - theirs) for mine, theirs in pairs]).sum()
