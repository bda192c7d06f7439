"""FedALA: each client learns, element by element, how much of the global model to take over.

Before local training, a client mixes its own model θ and the global model θ_g in the top layers:
θ + (θ_g − θ) ⊙ W, where the weights W are trained on a part of its data.

Reference: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.
"""

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
    """FedAvg with local mixing θ + (θ_g − θ) ⊙ W of the top layers before training; W is learned per element.

    All other layers are taken from the server. W is fitted until its loss converges at the client's second
    participation, and for one epoch at each later one. With W = 1 the method is FedAvg. Deviation: the part of the data
    on which W is fitted is drawn again for every epoch.
    """

    paper = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023"
    learns_from = ("labels", "multilabel")

    top: tuple[str, ...] = ("head",)
    """Layers to mix (the paper's p highest layers), by their names in the model."""
    fraction: float = 0.8
    """Fraction s of a client's data on which W is fitted."""
    eta: float = 1.0
    """Learning rate of W (η)."""
    threshold: float = 0.1
    """W has converged when the standard deviation of its loss over the last `window` epochs is below this."""
    window: int = 10
    """Number of epochs over which convergence of W is measured; see `threshold`."""
    most_epochs: int = 100
    """Maximum number of epochs of the first fit of W."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """θ, the W of the top layers, and whether W was ever fitted."""
        return ("model", *self.mixed, "fitted")

    @property
    def mixed(self) -> tuple[str, ...]:
        """The parts that hold the W of the top layers."""
        return tuple(f"weights.{name}" for name in self.top)

    def build(self, task: Task) -> dict[str, Part]:
        """Return θ and W. W starts at 1, which takes the global model unchanged."""
        model = task.model()
        layers = [name for name, layer in model.named_modules() if name and any(True for _ in layer.parameters())]
        if unknown := next((name for name in self.top if name not in layers), None):
            raise UserError(f"method.top = '{unknown}': is not a layer with parameters: {nearest(unknown, layers)}")
        return {"model": model, "weights": filled(model, 1.0), "fitted": torch.zeros(())}

    def update(self, client: Client) -> None:
        """Mix in the global model (from the client's second participation on), then train."""
        if not client.first:
            self.fit_weights(client)
            mixture = self.mixture(client)
            copy_(client.model, client.received.model)
            copy_(client.model, mixture)
        client.fit("model", self.loss)

    def fit_weights(self, client: Client) -> None:
        """Fit W: until convergence the first time, later for one epoch."""
        losses: list[float] = []
        for _ in range(1 if client.fitted else self.most_epochs):
            result = client.steps(self.learn, train=self.mixed, epochs=1, fraction=self.fraction, purpose="weights")
            losses.append(float(result["loss"]))
            if len(losses) > self.window and np.std(losses[-self.window :]) < self.threshold:
                break
        client.fitted.fill_(1)

    def learn(self, client: Client, batch: Batch) -> None:
        """Take one gradient step on W alone."""
        loss = client.objective.at(client.received.model, self.mixture(client), batch)
        client.note("loss", loss)
        client.descend(self.mixed, loss, lr=self.eta, plain=True)
        clamp_(client.weights, 0, 1)

    def mixture(self, client: Client) -> dict[str, Tensor]:
        """Return θ + (θ_g − θ) ⊙ W of the top layers."""
        own, theirs = (dict(model.named_parameters()) for model in (client.model, client.received.model))
        chosen = [(name, W) for name, W in client.weights.named_parameters() if under(name, self.top)]
        return {name: torch.lerp(own[name].detach(), theirs[name], W) for name, W in chosen}
