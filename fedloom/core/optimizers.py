"""SGD and Adam whose learning rate and step count are tensors, so that a captured step can be replayed.

Both follow torch.optim to the letter (the tests compare); their state is a flat list that is zeroed, kept or restored.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.checking import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """Which optimizer clients use, and its constants."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    keep: bool = Field(
        False, description="a client's momentum and step count go on in its next round, instead of beginning anew"
    )


class Optimizer:
    """Steps a fixed list of parameters in place, given their gradients."""

    def __init__(self, parameters: list[Tensor], settings: OptimizerSettings):
        self.parameters = parameters
        self.settings = settings
        device = parameters[0].device if parameters else None
        self.count = torch.zeros((), device=device, dtype=torch.float64)  # Adam's; 1 − 0.999^t needs the digits
        uses_first = settings.name == "adam" or settings.momentum > 0
        self.first = [torch.zeros_like(p) for p in parameters] if uses_first else []
        self.second = [torch.zeros_like(p) for p in parameters] if settings.name == "adam" else []

    def state(self) -> list[Tensor]:
        """Everything that must be zeroed, kept or restored."""
        return [*([self.count] if self.settings.name == "adam" else []), *self.first, *self.second]

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor | None, ...], lr: Tensor | float) -> None:
        """One step; parameters without a gradient stay as they are, as in torch.optim."""
        used = [i for i, g in enumerate(gradients) if g is not None]
        if not used:
            return
        parameters = [self.parameters[i] for i in used]
        grads: list[Tensor] = [g for g in gradients if g is not None]
        if self.settings.weight_decay:
            grads = list(torch._foreach_add(grads, parameters, alpha=self.settings.weight_decay))
        if self.settings.name == "adam":
            self.count.add_(1)
            self._adam(parameters, grads, [self.first[i] for i in used], [self.second[i] for i in used], lr)
            return
        if self.settings.momentum:
            velocity = [self.first[i] for i in used]
            torch._foreach_mul_(velocity, self.settings.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        descend_(parameters, grads, lr)

    def _adam(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        lr: Tensor | float,
    ) -> None:
        beta1, beta2 = self.settings.betas
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        scale = (1 - beta2**self.count).sqrt().to(first[0].dtype)
        rate = (lr / (1 - beta1**self.count)).to(first[0].dtype)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, scale)
        torch._foreach_add_(denominator, self.settings.eps)
        descend_(parameters, list(torch._foreach_div(first, denominator)), rate)


@torch.no_grad()
def descend_(parameters: list[Tensor], directions: list[Tensor], lr: Tensor | float) -> None:
    """parameter ← parameter − lr · direction."""
    torch._foreach_sub_(parameters, torch._foreach_mul(directions, lr))
