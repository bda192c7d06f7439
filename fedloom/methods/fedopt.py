"""FedAvgM, FedAdagrad, FedAdam and FedYogi: an optimizer at the server takes the clients' mean update as its gradient.

References: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv:1909.06335, 2019 (FedAvgM); Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (the other three, Alg. 2).
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.core.message import Message
from fedloom.core.options import Positive, Share
from fedloom.core.server import Server
from fedloom.core.state import Part
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class ServerOptimizer(FedAvg, abstract=True):
    """FedAvg with a server that steps along a direction computed from Δ, the mean of the clients' updates.

    Only parameters are optimized; batch-norm statistics are averaged as in FedAvg. Moments stay at the server.
    """

    server_keeps: ClassVar[tuple[str, ...]] = ("first",)

    server_lr: Positive = 1.0
    """Learning rate η of the server."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model and the server's moments."""
        model = task.model()
        moments: dict[str, Part] = {
            part: nn.ParameterList(torch.full_like(p, self._initial(part)) for p in model.parameters())
            for part in self.server_keeps
        }
        return {"model": model, **moments}

    def _initial(self, part: str) -> float:
        return 0.0

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the models, and take the optimizer's step x ← x + η · direction."""
        mean = server.average(messages)
        for i, (name, _) in enumerate(server.parts.get_submodule("model").named_parameters()):
            if (path := f"model.{name}") in mean:
                x, places = server.state[path], [f"{part}.{i}" for part in self.server_keeps]
                direction, *moments = self.step(mean[path] - x, *(server.state[place] for place in places))
                mean[path] = x + self.server_lr * direction
                mean |= zip(places, moments, strict=True)
        server.move(mean)

    def step(self, delta: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        """Return the direction of the step and the new moments."""
        raise NotImplementedError


class FedAvgM(ServerOptimizer):
    """FedAvg with momentum at the server: m ← βm + Δ, x ← x + ηm; β = 0 and η = 1 give FedAvg."""

    paper = "Hsu et al., Measuring the Effects of Non-Identical Data Distribution, arXiv:1909.06335, 2019"

    beta: Share = 0.9
    """Momentum β of the server."""

    def step(self, delta: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        """Return m twice: as the direction, and as the new moment."""
        m = self.beta * moments[0] + delta
        return m, m


class Adaptive(ServerOptimizer, abstract=True):
    """An adaptive server optimizer: m ← β₁m + (1 − β₁)Δ, x ← x + ηm / (√v + τ), where v starts at τ²."""

    paper = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    server_keeps = ("first", "second")

    server_lr: Positive = 0.01
    """Learning rate η of the server, about the largest change of a weight in a round. The default is ours."""
    beta_1: Share = 0.9
    """Decay β₁ of the first moment."""
    tau: Positive = 1e-3
    """Adaptivity τ: the smaller, the more the step size adapts to single weights."""

    def _initial(self, part: str) -> float:
        return self.tau**2 if part == "second" else 0.0

    def step(self, delta: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        """Return m / (√v + τ), m and v."""
        m = self.beta_1 * moments[0] + (1 - self.beta_1) * delta
        v = self._second(moments[1], delta.square())
        return m / (v.sqrt() + self.tau), m, v

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the new v, given Δ²."""
        raise NotImplementedError


class FedAdagrad(Adaptive):
    """FedAvg with Adagrad at the server: v ← v + Δ²."""

    beta_1: Share = 0.0
    """Decay β₁ of the first moment; the paper's experiments use none."""

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


class FedAdam(Adaptive):
    """FedAvg with Adam at the server, without bias correction: v ← β₂v + (1 − β₂)Δ²."""

    beta_2: Share = 0.99
    """Decay β₂ of the second moment."""

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * squared


class FedYogi(Adaptive):
    """FedAvg with Yogi at the server: v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    beta_2: Share = 0.99
    """Decay β₂ of the second moment."""

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta_2) * squared * torch.sign(v - squared)
