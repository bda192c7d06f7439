"""FedALA: how much of the global model each client takes, learnt element by element (Zhang et al., 2023)."""

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.errors import UserError, nearest
from fedloom.core.state import Part, clamp_, copy_, filled, under
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedALA(FedAvg):
    """Lower layers come from the server; in the top ones a client mixes, θ + (θ_g − θ) ⊙ W, then it trains.

    W is fitted until its loss stands still at a client's second participation, later for an epoch. Deviation: the share
    of the data that it is fitted on is drawn anew for every epoch.
    """

    paper = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023"
    learns_from = ("labels",)

    top: tuple[str, ...] = ("head",)
    """Layers that are mixed (the paper's p highest), by their names in the model; all others are the server's."""
    fraction: float = 0.8
    """Share s of a client's data that W is fitted on."""
    eta: float = 1.0
    """Learning rate of W (η)."""
    threshold: float = 0.1
    """The loss stands still when its standard deviation over the last `window` epochs is below this."""
    window: int = 10
    """See `threshold`."""
    most_epochs: int = 100
    """Where the first fit of W ends in any case."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """θ, the W of the top layers, and whether that was fitted yet."""
        return ("model", *self.mixed, "fitted")

    @property
    def mixed(self) -> tuple[str, ...]:
        """Where W is."""
        return tuple(f"weights.{name}" for name in self.top)

    def build(self, task: Task) -> dict[str, Part]:
        """θ, and W = 1: the server's model as it is."""
        model = task.model()
        layers = [name for name, layer in model.named_modules() if name and any(True for _ in layer.parameters())]
        if unknown := next((name for name in self.top if name not in layers), None):
            raise UserError(f"method.top = '{unknown}': no such layer with weights; {nearest(unknown, layers)}")
        return {"model": model, "weights": filled(model, 1.0), "fitted": torch.zeros(())}

    def update(self, client: Client) -> None:
        """Adaptive local aggregation, from the second time on; then local training."""
        if not client.first:
            self.fit_weights(client)
            mixture = self.mixture(client)
            copy_(client.model, client.received.model)
            copy_(client.model, mixture)
        client.fit("model", self.loss)

    def fit_weights(self, client: Client) -> None:
        """W, to convergence the first time."""
        losses: list[float] = []
        for _ in range(1 if client.fitted else self.most_epochs):
            result = client.steps(self.learn, train=self.mixed, epochs=1, fraction=self.fraction, purpose="weights")
            losses.append(float(result["loss"]))
            if len(losses) > self.window and np.std(losses[-self.window :]) < self.threshold:
                break
        client.fitted.fill_(1)

    def learn(self, client: Client, batch: Batch) -> None:
        """A step of W, and of nothing else."""
        loss = client.objective.at(client.received.model, self.mixture(client), batch)
        client.note("loss", loss)
        client.descend(self.mixed, loss, lr=self.eta, plain=True)
        clamp_(client.weights, 0, 1)

    def mixture(self, client: Client) -> dict[str, Tensor]:
        """θ + (θ_g − θ) ⊙ W of the top layers."""
        own, theirs = (dict(model.named_parameters()) for model in (client.model, client.received.model))
        chosen = [(name, W) for name, W in client.weights.named_parameters() if under(name, self.top)]
        return {name: torch.lerp(own[name].detach(), theirs[name], W) for name, W in chosen}
