"""FedAMP: clients whose models are alike attract each other (Huang et al., 2021)."""

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
    """The server sends each client its own mixture u_i of all models; the client minimises f + λ/(2α_k) ‖w − u_i‖².

    A client goes on from its own w_i and is served by it. One that has not sent a model yet is in nobody's mixture; for
    its own it counts as the initial model.
    """

    paper = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    shares, sends, receives = (), ("model",), ("mixture",)
    keeps = ("model",)
    has_global = False
    learns_from = ("labels",)

    lam: float = 1.0
    """Strength of the pull towards u_i (λ); with 0 it is Local."""
    alpha_k: float = 1.0
    """Step size of the message passing (α_k): others get ξ_ij = α_k A'(‖w_i − w_j‖²), and the pull is λ/α_k."""
    sigma: float | None = None
    """Scale of the distances, A(x) = 1 − exp(−x/σ); α_k times the number of clients if not given, so that the shares of
    all others together stay below 1. (Ours: the papers tune it.)"""
    similarity: Literal["distance", "cosine"] = "distance"
    """`cosine` is HeurFedAMP."""
    sharpness: float = 25.0
    """HeurFedAMP's σ: others share in proportion to exp(σ cos(w_i, w_j))."""
    own_share: float | None = None
    """HeurFedAMP's ξ_ii, what a client keeps of itself; as much as each of N clients, 1/N, if not given."""

    def build(self, task: Task) -> dict[str, Part]:
        """w_i (`model`) and u_i (`mixture`)."""
        if self.alpha_k <= 0 or (self.sigma is not None and self.sigma <= 0):
            raise UserError(f"method.alpha_k = {self.alpha_k}, method.sigma = {self.sigma}: both must be above 0")
        model = task.model()
        return {"model": model, "mixture": deepcopy(model)}

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """The local loss, and the pull towards u_i."""
        pull = self.lam / (2 * self.alpha_k) * squared_distance(client.model, client.received.mixture)
        return super().loss(client, batch) + pull

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Nothing is averaged: the server remembers everybody's model."""
        for message in messages:
            assert message.client is not None
            server.clients[message.client] = {_mixture(name): value for name, value in message.items()}

    def message_for(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """u_i = Σ_j ξ_ij w_j."""
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
        """ξ_ij of the others."""
        if self.similarity == "distance":
            distances = torch.stack([(w - _flat(server.clients[j], names)).square().sum() for j in others])
            sigma = self.sigma or self.alpha_k * server.federation
            return self.alpha_k * torch.exp(-distances / sigma) / sigma
        cosines = torch.stack([torch.cosine_similarity(w, _flat(server.clients[j], names), 0) for j in others])
        own = 1 / (1 + len(others)) if self.own_share is None else self.own_share
        return (1 - own) * torch.softmax(self.sharpness * cosines, 0)


def _mixture(name: str) -> str:
    """Where a tensor of `model` is in `mixture`."""
    return "mixture" + name.removeprefix("model")


def _flat(state: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """All parameters in one vector, in float64."""
    return torch.cat([state[name].flatten().double() for name in names])
