"""Optimizers of torch.optim, made by a function that was passed as an object. For steps that are not recorded."""

import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.optimizers import TORCH_OPTIMIZERS, OptimizerSettings, clipped


class TorchOptimizer:
    """Updates parameters with an optimizer of torch.optim; a new one is made for every fit.

    It has the interface of `fedloom.core.optimizers.Optimizer`. Its state is inside torch's optimizer, which allocates
    it while it runs and counts steps in Python, so steps cannot be recorded or stacked.
    """

    def __init__(self, parameters: list[Tensor], settings: OptimizerSettings):
        self.parameters, self.settings = parameters, settings
        self._optimizer: torch.optim.Optimizer | None = None
        self._ratios: list[float] = []
        """Learning rate of each parameter group, relative to that of the first group."""
        self._lr: Tensor | float | None = None
        """The learning rate that was set last."""

    def reset(self) -> None:
        """Forget all state."""
        self._optimizer = self._lr = None

    def state(self) -> list[Tensor]:
        """Return no tensors: the state is not kept or sent."""
        return []

    def tensors(self) -> list[Tensor]:
        """Return no tensors."""
        return []

    def step(self, gradients: tuple[Tensor | None, ...], lr: Tensor | float) -> None:
        """Take one step with the learning rate of the recipe; other parameter groups keep their ratio to the first.

        A tensor is read once per fit: on a GPU, reading it waits for all work before.

        Raises:
            UserError: The first group has the learning rate 0, but not every group.
        """
        if self._optimizer is None:
            self._optimizer = TORCH_OPTIMIZERS[self.settings.name](self.parameters)
            self._ratios = _ratios([float(group["lr"]) for group in self._optimizer.param_groups])
        if lr is not self._lr:
            rate, self._lr = float(lr), lr
            for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = rate * ratio
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        grads = [gradient for gradient in gradients if gradient is not None]
        if self.settings.clip is not None and grads:
            grads = clipped(grads, self.settings.clip)
        for i, gradient in zip(used, grads, strict=True):
            self.parameters[i].grad = gradient
        self._optimizer.step()
        for i in used:
            self.parameters[i].grad = None


def _ratios(rates: list[float]) -> list[float]:
    if rates[0] == 0 and any(rates):
        raise UserError(
            f"optimizer: parameter groups with learning rates {rates}: the first must not be 0, because the others are "
            "scaled with it; put another group first"
        )
    return [rate / rates[0] if rate != rates[0] else 1.0 for rate in rates]
