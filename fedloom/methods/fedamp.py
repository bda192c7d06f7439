"""FedAMP: clients with similar models are pulled towards each other.

The server stores every client's last model and sends each client i a mixture u_i of all models, in which similar
models weigh more. The client is regularised towards u_i.

Reference: Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server
from fedloom.core.state import Part, State, squared_distance
from fedloom.core.task import Task


class FedAMP(Method):
    """Personal models w_i that minimise f + λ/(2α_k) ‖w − u_i‖², with u_i a mixture in which similar models weigh more.

    A client continues from its own w_i and uses it for predictions. A client that has not sent a model yet is left out
    of the other clients' mixtures; in its own mixture the initial model takes its place.
    """

    paper = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    shares, sends, receives = (), ("model",), ("mixture",)
    keeps = ("model",)
    has_global = False
    learns_from = ("labels", "multilabel")

    lam: float = 1.0
    """Weight λ of the distance from u_i; 0 gives Local."""
    alpha_k: float = 1.0
    """Step size α_k of the message passing: ξ_ij = α_k A'(‖w_i − w_j‖²); the proximal weight is λ/α_k."""
    sigma: float | None = None
    """Scale σ of the distances in A(x) = 1 − exp(−x/σ). Default (ours): α_k · N, which keeps Σ_j≠i ξ_ij below 1."""
    similarity: Literal["distance", "cosine"] = "distance"
    """How models are compared: by Euclidean distance (FedAMP) or by cosine similarity (HeurFedAMP)."""
    sharpness: float = 25.0
    """HeurFedAMP's σ: other clients' models are weighted in proportion to exp(σ cos(w_i, w_j))."""
    own_share: float | None = None
    """HeurFedAMP's ξ_ii, the weight of the client's own model; by default 1/N for N known clients."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return w_i (`model`) and u_i (`mixture`)."""
        if self.alpha_k <= 0 or (self.sigma is not None and self.sigma <= 0):
            raise UserError(f"method.alpha_k = {self.alpha_k}, method.sigma = {self.sigma}: both must be above 0")
        model = task.model()
        return {"model": model, "mixture": deepcopy(model)}

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the local loss plus the proximal term towards u_i."""
        pull = self.lam / (2 * self.alpha_k) * squared_distance(client.model, client.received.mixture)
        return super().loss(client, batch) + pull

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Store each client's model on the server; nothing is averaged."""
        for message in messages:
            assert message.client is not None
            server.clients[message.client] = {_mixture(name): value for name, value in message.items()}

    def message_for(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """Return u_i = Σ_j ξ_ij w_j."""
        own: State = server.clients.get(client, server.state)
        names = [f"mixture.{name}" for name, _ in server.parts.get_submodule("mixture").named_parameters()]
        others = [j for j in server.clients if j != client]
        if not others:
            return own
        w = _flat(own, names)
        xi = self.weights(w, server, others, names)
        mixed = w * (1 - xi.sum())  # ξ_ii
        for j, share in zip(others, xi, strict=True):
            mixed += share * _flat(server.clients[j], names)
        pieces = mixed.float().split([own[name].numel() for name in names])
        return own | {name: piece.view_as(own[name]) for name, piece in zip(names, pieces, strict=True)}

    def weights(self, w: Tensor, server: Server, others: list[int], names: list[str]) -> Tensor:
        """Return ξ_ij for all other clients j."""
        if self.similarity == "distance":
            distances = torch.stack([(w - _flat(server.clients[j], names)).square().sum() for j in others])
            sigma = self.sigma or self.alpha_k * server.federation
            return self.alpha_k * torch.exp(-distances / sigma) / sigma
        cosines = torch.stack([torch.cosine_similarity(w, _flat(server.clients[j], names), 0) for j in others])
        own = 1 / (1 + len(others)) if self.own_share is None else self.own_share
        return (1 - own) * torch.softmax(self.sharpness * cosines, 0)


def _mixture(name: str) -> str:
    """Return the name in `mixture` of a tensor of `model`."""
    return "mixture" + name.removeprefix("model")


def _flat(state: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Return all parameters in one float64 vector."""
    return torch.cat([state[name].flatten().double() for name in names])
