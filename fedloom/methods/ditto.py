"""Ditto: a personal model per client, regularised towards the global model.

Clients train the global model w as in FedAvg, then a personal model v on f(v) + λ/2 ‖v − w‖².

Reference: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.
"""

from copy import deepcopy
from typing import Any, Literal

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.state import Part, copy_, squared_distance
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class Ditto(FedAvg):
    """FedAvg's global model w, and a personal model v per client that minimises f(v) + λ/2 ‖v − w‖².

    FedStyle's appendix uses `towards: optimised` and λ = 2. As printed there, clients send v instead of w, which
    `averages: personal` reproduces.
    """

    paper = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    keeps = ("personal",)

    lam: float = 0.1
    """Weight λ of the distance between personal and global model; 0 trains v alone. The paper tunes it in 0.05–2."""
    towards: Literal["received", "optimised"] = "received"
    """The w that v is pulled towards: as received from the server, or after the client's training (FedStyle)."""

    averages: Literal["global", "personal"] = "global"
    """Model that clients send: w (`global`), or v (`personal`) as printed in FedStyle's appendix."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return w (`model`) and v (`personal`), initially equal."""
        model = task.model()
        return {"model": model, "personal": deepcopy(model)}

    def prepare(self, client: Client) -> None:
        """Start v from the received w. In round 1 that is the common initial model."""
        copy_(client.personal, client.model)

    def update(self, client: Client) -> None:
        """Train w as in FedAvg, then v."""
        client.fit("model", self.loss)
        client.fit("personal", self.personal_loss)
        if self.averages == "personal":
            copy_(client.model, client.personal)

    def personal_loss(self, client: Client, batch: Batch) -> Tensor:
        """Return f(v) plus the proximal term."""
        w = client.received.model if self.towards == "received" else client.model
        fit: Tensor = client.objective(client.personal, batch)
        return fit + self.lam / 2 * squared_distance(client.personal, w)

    def network(self, client: Client) -> Any:
        """Return v."""
        return client.personal
