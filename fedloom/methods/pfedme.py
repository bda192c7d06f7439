"""pFedMe: personal models by Moreau envelopes (Dinh et al., 2020)."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_, parameters_of, squared_distance
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class PFedMe(FedAvg):
    """For every batch θ approaches argmin f(θ) + λ/2 ‖θ − w‖², then w moves towards θ; θ serves the client.

    Plain steps, whatever the recipe's optimizer (its learning rate is w's). Batch-norm statistics, which only θ
    collects, travel with w.
    """

    paper = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    keeps = ("personal",)
    learns_from = ("labels",)

    lam: float = 15.0
    """How strongly θ is held near w (λ); w moves by the learning rate times λ, so that should stay below 1 or so."""
    inner: int = 5
    """Gradient steps of θ for a batch (K)."""
    personal_lr: float = 0.02
    """Learning rate of θ, below 1/λ. (Ours.)"""
    beta: float = 1.0
    """How far the server moves towards the clients' average; 1 is all the way."""

    def build(self, task: Task) -> dict[str, Part]:
        """w (`model`) and θ (`personal`), a copy of its own."""
        if self.inner < 1:
            raise UserError(f"method.inner = {self.inner}: θ takes at least 1 step for a batch")
        model = task.model()
        return {"model": model, "personal": deepcopy(model)}

    def update(self, client: Client) -> None:
        """θ starts from the received w."""
        copy_(client.personal, client.model)
        client.steps(self.step, train=("model", "personal"))

    def step(self, client: Client, batch: Batch) -> None:
        """K steps of θ on one batch, one of w."""
        for _ in range(self.inner):
            loss: Tensor = client.objective(client.personal, batch)
            pull = self.lam / 2 * squared_distance(client.personal, client.model)
            client.descend("personal", loss + pull, lr=self.personal_lr, plain=True)
        client.note("loss", loss)
        with torch.no_grad():
            for w, theta in zip(parameters_of(client.model), parameters_of(client.personal), strict=True):
                w.lerp_(theta, client.lr * self.lam)  # w ← w − ηλ(w − θ)
        copy_(client.model, dict(client.personal.named_buffers()))

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """w ← (1−β)w + β · mean of w_i; statistics are averaged, never extrapolated."""
        mean = server.average(messages, by="uniform")
        server.move(mean, {name: self.beta for name, _ in server.parts.named_parameters()})

    def network(self, client: Client) -> Any:
        """θ."""
        return client.personal
