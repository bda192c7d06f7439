"""Optimizers, learning-rate schedules, and the `training` section of a recipe.

SGD and Adam compute the same as torch.optim (tests compare them), but hold learning rate and step count as tensors.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.checking import Section, as_written
from fedloom.core.state import FlatState, Layout
from fedloom.core.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """The clients' optimizer and its constants."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.05, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    keep: bool = Field(
        False, description="keep a client's momentum and step count for its next round instead of resetting them"
    )


class Optimizer:
    """Updates a fixed list of parameters in place, given their gradients.

    Args:
        parameters: The parameters.
        settings: The kind of optimizer and its constants.
        allocate: Called as `allocate(name, shape, dtype)` for memory of the optimizer's state, one flat buffer per
            moment and dtype. Default: zeros on the parameters' device.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        settings: OptimizerSettings,
        allocate: Callable[[str, tuple[int, ...], torch.dtype], Tensor] | None = None,
    ):
        self.parameters = parameters
        self.settings = settings
        device = parameters[0].device if parameters else None
        allocate = allocate or (lambda name, shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
        adam, names = settings.name == "adam", {str(i): p for i, p in enumerate(parameters)}
        self.count = allocate(
            "count", (), torch.float64
        )  # for Adam; float64, because 1 − 0.999^t loses digits in float32
        layout = Layout.of(names)
        self._moments = [
            FlatState(
                layout, {dtype: allocate(f"{name} {dtype}", (size,), dtype) for dtype, size in layout.sizes.items()}
            )
            for name, used in (("first", adam or settings.momentum > 0), ("second", adam))
            if used
        ]
        views = [list(moment.values()) for moment in self._moments]
        self.first, self.second = (*views, [], [])[:2]

    def state(self) -> list[Tensor]:
        """Return all state that must be zeroed, kept or restored."""
        counted = [self.count] if self.settings.name == "adam" else []
        return [*counted, *(buffer for moment in self._moments for buffer in moment.buffers.values())]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step reads and writes besides the parameters."""
        return [self.count, *self.first, *self.second]

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor | None, ...], lr: Tensor | float) -> None:
        """Take one step. Parameters without a gradient do not change, as in torch.optim."""
        used = [i for i, g in enumerate(gradients) if g is not None]
        if not used:
            return
        parameters = [self.parameters[i] for i in used]
        grads: list[Tensor] = [g for g in gradients if g is not None]
        if self.settings.weight_decay:
            grads = list(foreach_add(grads, parameters, alpha=self.settings.weight_decay))
        if self.settings.name == "adam":
            self.count.add_(1)
            self._adam(parameters, grads, [self.first[i] for i in used], [self.second[i] for i in used], lr)
            return
        if self.settings.momentum:
            velocity = [self.first[i] for i in used]
            foreach_mul_(velocity, self.settings.momentum)
            foreach_add_(velocity, grads)
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
        foreach_lerp_(first, grads, 1 - beta1)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grads, grads, 1 - beta2)
        scale = (1 - beta2**self.count).sqrt().to(first[0].dtype)
        rate = (lr / (1 - beta1**self.count)).to(first[0].dtype)
        denominator = foreach_sqrt(second)
        foreach_div_(denominator, scale)
        foreach_add_(denominator, self.settings.eps)
        descend_(parameters, list(foreach_div(first, denominator)), rate)


@torch.no_grad()
def descend_(parameters: list[Tensor], directions: list[Tensor], lr: Tensor | float) -> None:
    """Update in place: parameter ← parameter − lr · direction."""
    foreach_sub_(parameters, foreach_mul(directions, lr))


def schedule_factor(schedule: str, round: int, rounds: int) -> float:
    """Return the factor of the learning rate in a round.

    Args:
        schedule: `constant`, `cosine`, `exponential:0.99` (multiply by 0.99 per round) or `step:50=0.2,75=0.02`
            (multiply by 0.2 from round 50, by 0.02 from round 75).
        round: The round, counted from 1.
        rounds: Total number of rounds.

    Raises:
        ValueError: The text is not a schedule.
    """
    kind, _, rest = schedule.partition(":")
    try:
        if kind == "constant" and not rest:
            return 1.0
        if kind == "cosine" and not rest:
            return 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))
        if kind == "exponential":
            return float(float(rest) ** (round - 1))
        if kind == "step":
            steps = {int(start): float(factor) for start, factor in (pair.split("=") for pair in rest.split(","))}
            reached = [start for start in steps if start <= round]
            return steps[max(reached)] if reached else 1.0
    except ValueError:
        pass
    raise ValueError(
        f"'{schedule}' is unknown; write constant, cosine, exponential:0.99 or step:50=0.2,75=0.02 (round=factor)"
    )


class Training(Section):
    """The `training` section: number of rounds, participation and the clients' training."""

    rounds: int = Field(20, ge=1, description="communication rounds")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    epochs: int = Field(1, ge=0, description="passes over a client's data per round")
    batch_size: int = Field(
        32, ge=1, description="samples per training step; the last batch of an epoch may be smaller"
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: Annotated[str, as_written(lambda schedule: schedule_factor(schedule, 1, 1))] = Field(
        "constant", description="learning rate over rounds: constant, cosine, exponential:0.99, step:50=0.2,75=0.02"
    )

    min_clients: int = Field(
        1, ge=1, description="responses that a round needs; with fewer it is retried with other clients"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="if a client raises an exception: stop the run and show it, or skip the client in that round "
        "(clients that die, time out or send invalid values are always skipped)",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="end the run after this many evaluations in a row without an improvement on validation samples, "
        "and restore the state of the best round (needs a split with validation, such as data.split: pooled:0.6:0.2); "
        "default: run all rounds",
    )

    def lr(self, round: int) -> float:
        """Return the learning rate of a round."""
        return self.optimizer.lr * schedule_factor(self.schedule, round, self.rounds)
