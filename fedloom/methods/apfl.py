"""APFL: each client's personal model is a mixture of a local model and the global model.

Clients train the global model w as in FedAvg, and a local model v. Predictions use αv + (1−α)w.

Reference: Deng et al., "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020.
"""

from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.state import Part, copy_, parameters_of
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg
from fedloom.objectives import SelfSupervised, Views


class APFL(FedAvg):
    """A personal mixture αv + (1−α)w per client of a local model v and FedAvg's global model w.

    v is trained so that the mixture fits the client's data. Deviation: the average of w is weighted by sample counts.
    `mixes: outputs` is the version in FedStyle's appendix. As printed there, clients send v instead of w, which
    `averages: personal` reproduces.
    """

    paper = "Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461"
    keeps = ("personal", "alpha")

    alpha: float = 0.5
    """Weight of v (of w with `mixes: outputs`), initial if `adaptive`. 0 gives FedAvg's model, 1 a local model."""
    adaptive: bool = False
    """Whether α is trained too: one gradient step per batch (Eq. 3)."""
    mixes: Literal["weights", "outputs"] = "weights"
    """Mix weights, or (`outputs`) the projections of the two views: FedStyle's version for training without labels."""

    averages: Literal["global", "personal"] = "global"
    """Model that clients send: w (`global`), or v (`personal`) as printed in FedStyle's appendix."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return w (`model`), v (`personal`, initially equal to w) and the client's α."""
        if self.mixes == "outputs" and (task.objective.supervised or self.adaptive):
            wrong = "adaptive = true" if self.adaptive else f"objective.name = '{task.objective.name}'"
            raise UserError(
                "method.mixes = 'outputs': needs an objective without labels and a fixed α; "
                f"it does not work with {wrong}"
            )
        model = task.model()
        return {"model": model, "personal": deepcopy(model), "alpha": torch.tensor(self.alpha)}

    def prepare(self, client: Client) -> None:
        """Start v from the received w. In round 1 that is the common initial model."""
        copy_(client.personal, client.model)

    def update(self, client: Client) -> None:
        """Train w and v on the same batches."""
        client.steps(self.step if self.mixes == "weights" else self.step_outputs, train=("model", "personal"))
        if self.averages == "personal":
            copy_(client.model, client.personal)

    def step(self, client: Client, batch: Batch) -> None:
        """Update both models; both losses are computed before either model changes."""
        alpha = client.alpha.detach().requires_grad_(self.adaptive)
        loss = self.loss(client, batch)
        mixed = client.objective.at(client.personal, self.mixture(client, alpha), batch)
        client.note("loss", loss)
        slope = torch.autograd.grad(mixed, alpha, retain_graph=True)[0] if self.adaptive else None  # ⟨∇f(v̄), v − w⟩
        client.descend("personal", mixed)  # the gradient with respect to v alone, hence times α
        client.descend("model", loss)
        if slope is not None:
            client.alpha.sub_(client.lr * slope).clamp_(0, 1)  # Eq. 3

    def mixture(self, client: Client, alpha: Tensor) -> dict[str, Tensor]:
        """Return v̄ = αv + (1−α)w, detached from w."""
        pairs = zip(client.personal.named_parameters(), parameters_of(client.model), strict=True)
        return {name: torch.lerp(w.detach(), v, alpha) for (name, v), w in pairs}

    def step_outputs(self, client: Client, batch: Batch) -> None:
        """Update both models as in FedStyle's appendix. Its line 12 prints z where z_g is meant."""
        objective: SelfSupervised = client.objective
        z_g, z = (objective.project(model, objective.encode(model, batch)) for model in (client.model, client.personal))
        (first_g, second_g), (first, second) = z_g.online, z.online
        crossed = (
            torch.lerp(second, first_g.detach(), client.alpha),  # line 9
            torch.lerp(first, second_g.detach(), client.alpha),  # line 10
        )
        loss = objective.compare(client.model, z_g)
        mixed = objective.compare(client.personal, Views(crossed, z.target and z.target[::-1]))
        client.note("loss", loss)
        client.descend("model", loss)  # line 12
        client.descend("personal", mixed)  # line 13

    @torch.no_grad()
    def personalise(self, client: Client) -> None:
        """Mix v with the aggregated w. The client's stored v stays unmixed."""
        if self.mixes == "weights":
            copy_(client.personal, self.mixture(client, client.alpha))

    def network(self, client: Client) -> Any:
        """Return the mixture after `personalise`, or v with `mixes: outputs`."""
        return client.personal
