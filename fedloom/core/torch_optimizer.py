"""Optimizers of torch.optim, made by a function that was passed as an object. For steps that are not recorded."""

import torch
from torch import Tensor

from fedloom.core.optimizers import TORCH_OPTIMIZERS, OptimizerSettings, clipped


class TorchOptimizer:
    """Updates parameters with an optimizer of torch.optim; a new one is made for every fit.

    It has the interface of `fedloom.core.optimizers.Optimizer`. Its state is inside torch's optimizer, which allocates
    it while it runs and counts steps in Python, so steps cannot be recorded or stacked.
    """

    def __init__(self, parameters: list[Tensor], settings: OptimizerSettings):
        self.parameters, self.settings = parameters, settings
        self._optimizer: torch.optim.Optimizer | None = None

    def reset(self) -> None:
        """Forget all state."""
        self._optimizer = None

    def state(self) -> list[Tensor]:
        """Return no tensors: the state is not kept or sent."""
        return []

    def tensors(self) -> list[Tensor]:
        """Return no tensors."""
        return []

    def step(self, gradients: tuple[Tensor | None, ...], lr: Tensor | float) -> None:
        """Take one step with the learning rate of the recipe."""
        if self._optimizer is None:
            self._optimizer = TORCH_OPTIMIZERS[self.settings.name](self.parameters)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        grads = [gradient for gradient in gradients if gradient is not None]
        if self.settings.clip is not None and grads:
            grads = clipped(grads, self.settings.clip)
        for i, gradient in zip(used, grads, strict=True):
            self.parameters[i].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = float(lr)
        self._optimizer.step()
        for i in used:
            self.parameters[i].grad = None
