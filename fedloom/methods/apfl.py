"""APFL: a personal model that is a mixture of a local and the global one (Deng et al., 2020)."""

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
    """w is FedAvg's; v learns so that the mixture αv + (1−α)w fits the client, which is served by that mixture.

    Deviation: the average of w is weighted by sample counts. FedStyle's appendix (`mixes: outputs`) prints that clients
    send v: `averages: personal`.
    """

    paper = "Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461"
    keeps = ("personal", "alpha")

    alpha: float = 0.5
    """Share of v in the mixture, at first if it adapts; with `mixes: outputs` the share of w, as printed there."""
    adaptive: bool = False
    """Whether α follows its own gradient, step by step (Eq. 3)."""
    mixes: Literal["weights", "outputs"] = "weights"
    """`outputs` is FedStyle's version, for objectives without labels: projections are mixed, across views."""

    averages: Literal["global", "personal"] = "global"
    """What the server averages: w, or v, as FedStyle's appendix prints it."""

    def build(self, task: Task) -> dict[str, Part]:
        """w (`model`), v (`personal`), which start alike, and the client's α."""
        if self.mixes == "outputs" and (task.objective.supervised or self.adaptive):
            wrong = "adaptive = true" if self.adaptive else f"objective.name = '{task.objective.name}'"
            raise UserError(
                f"method.mixes = 'outputs' is for learning without labels, with a fixed α: not with {wrong}"
            )
        model = task.model()
        return {"model": model, "personal": deepcopy(model), "alpha": torch.tensor(self.alpha)}

    def prepare(self, client: Client) -> None:
        """v starts where w is, also for a client that comes late; in round 1 that is the common start."""
        copy_(client.personal, client.model)

    def update(self, client: Client) -> None:
        """w and v step by step, on the same batches."""
        client.steps(self.step if self.mixes == "weights" else self.step_outputs, train=("model", "personal"))
        if self.averages == "personal":
            copy_(client.model, client.personal)

    def step(self, client: Client, batch: Batch) -> None:
        """Both gradients are taken before either model moves."""
        alpha = client.alpha.detach().requires_grad_(self.adaptive)
        loss = self.loss(client, batch)
        mixed = client.objective.at(client.personal, self.mixture(client, alpha), batch)
        client.note("loss", loss)
        slope = torch.autograd.grad(mixed, alpha, retain_graph=True)[0] if self.adaptive else None  # ⟨∇f(v̄), v − w⟩
        client.descend("personal", mixed)  # through v alone, so times α
        client.descend("model", loss)
        if slope is not None:
            client.alpha.sub_(client.lr * slope).clamp_(0, 1)  # Eq. 3

    def mixture(self, client: Client, alpha: Tensor) -> dict[str, Tensor]:
        """v̄ = αv + (1−α)w, without a gradient to w."""
        pairs = zip(client.personal.named_parameters(), parameters_of(client.model), strict=True)
        return {name: torch.lerp(w.detach(), v, alpha) for (name, v), w in pairs}

    def step_outputs(self, client: Client, batch: Batch) -> None:
        """FedStyle's appendix; where its line 12 prints z, z_g is meant."""
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
        """Mixes v with the aggregated w; what the client keeps is v."""
        if self.mixes == "weights":
            copy_(client.personal, self.mixture(client, client.alpha))

    def network(self, client: Client) -> Any:
        """The mixture, once it is made; v where outputs were mixed."""
        return client.personal
