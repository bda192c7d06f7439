"""Ditto: the global model of FedAvg, and a personal one held near it (Li et al., 2021)."""

from copy import deepcopy
from typing import Any, Literal

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_, squared_distance
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class Ditto(FedAvg):
    """w is FedAvg's; each client also trains a personal v on f(v) + λ/2 ‖v − w‖², and is served by it.

    FedStyle's appendix (`towards: optimised`, λ = 2) prints that clients send v: `averages: personal`.
    """

    paper = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    keeps = ("personal",)

    lam: float = 0.1
    """How strongly the personal model is held near the global one (the paper's λ; it tunes it in 0.05–2)."""
    towards: Literal["received", "optimised"] = "received"
    """The w that it is held near: as it came from the server, or after the client's own training (FedStyle)."""

    averages: Literal["global", "personal"] = "global"
    """What the server averages: w, or v, as FedStyle's appendix prints it."""

    def build(self, task: Task) -> dict[str, Part]:
        """w (`model`) and v (`personal`), which start alike."""
        model = task.model()
        return {"model": model, "personal": deepcopy(model)}

    def prepare(self, client: Client) -> None:
        """v starts where w is, also for a client that comes late; in round 1 that is the common start."""
        copy_(client.personal, client.model)

    def update(self, client: Client) -> None:
        """FedAvg's round, then the personal model's."""
        client.fit("model", self.loss)
        client.fit("personal", self.personal_loss)
        if self.averages == "personal":
            copy_(client.model, client.personal)

    def personal_loss(self, client: Client, batch: Batch) -> Tensor:
        """f(v) and the pull towards w."""
        w = client.received.model if self.towards == "received" else client.model
        fit: Tensor = client.objective(client.personal, batch)
        return fit + self.lam / 2 * squared_distance(client.personal, w)

    def network(self, client: Client) -> Any:
        """v."""
        return client.personal
