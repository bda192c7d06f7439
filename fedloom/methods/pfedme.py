"""pFedMe: personal models by Moreau envelopes.

For each batch, the personal model θ approaches the minimum of f(θ) + λ/2 ‖θ − w‖², then w moves towards θ. The server
averages w.

Reference: Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
"""

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
    """A personal model θ per client that approximates argmin f(θ) + λ/2 ‖θ − w‖², and a global w that moves towards θ.

    All steps are plain gradient descent, regardless of the recipe's optimizer, whose learning rate applies to w. Only θ
    collects batch-norm statistics; they are sent with w.
    """

    paper = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    keeps = ("personal",)
    learns_from = ("labels", "multilabel")

    lam: float = 15.0
    """Weight λ of the distance between θ and w. w moves by learning rate · λ, which should stay below about 1."""
    inner: int = 5
    """Gradient steps of θ per batch (K)."""
    personal_lr: float = 0.02
    """Learning rate of θ; should stay below 1/λ. The default is ours."""
    beta: float = 1.0
    """Step β of the server towards the clients' average; 1 replaces the global model by the average."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return w (`model`) and θ (`personal`), a separate copy."""
        if self.inner < 1:
            raise UserError(f"method.inner = {self.inner}: must be at least 1")
        model = task.model()
        return {"model": model, "personal": deepcopy(model)}

    def update(self, client: Client) -> None:
        """Start θ from the received w, then train both."""
        copy_(client.personal, client.model)
        client.steps(self.step, train=("model", "personal"))

    def step(self, client: Client, batch: Batch) -> None:
        """Take K steps of θ on one batch, then one step of w."""
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
        """Update w ← (1−β)w + β · mean of w_i. Batch-norm statistics are always averaged, regardless of β."""
        mean = server.average(messages, by="uniform")
        server.move(mean, {name: self.beta for name, _ in server.parts.named_parameters()})

    def network(self, client: Client) -> Any:
        """Return θ."""
        return client.personal
