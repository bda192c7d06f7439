"""Optimizers of clients.

All optimizers but Lion compute the same as torch.optim (tests compare them), but hold learning rate and step count as
tensors, so that a recorded step can be replayed with other values. All state starts at zero.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.checking import Section, as_written, refusal
from fedloom.core.errors import UserError, nearest
from fedloom.core.flat_state import FlatState, Layout
from fedloom.core.registry import OBJECT, refuse_object
from fedloom.core.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sign,
    foreach_sqrt,
    foreach_sub_,
)

MOMENTS = ("first", "second", "third", "fourth")
"""Names of moments."""
NOT_KEPT = (
    "the state of a torch.optim optimizer cannot be kept between rounds; use an object with a function direction(), or "
    "a built-in optimizer"
)
Beta = Annotated[float, Field(ge=0, lt=1)]
LION_BETAS = (0.9, 0.99)
"""Lion's default betas (Chen et al., 2023)."""


class OptimizerSettings(Section):
    """The clients' optimizer and its constants."""

    name: Annotated[str, as_written(lambda name: _refuse_unknown(name))] = Field(
        "sgd", description="the update rule: sgd, adam, adamw, rmsprop, adagrad or lion"
    )
    lr: float = Field(0.05, gt=0, description="learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd and rmsprop")
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay: added to the gradient, or for adamw and lion applied to the parameters"
    )
    decay_norms: bool = Field(
        True,
        description="apply weight decay to normalisation layers and biases too (parameters of at most one dimension)",
    )
    clip: float | None = Field(
        None, gt=0, description="maximum L2 norm of all gradients of a step together; default: no maximum"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the moments of adam, adamw and lion; lion's default is [0.9, 0.99]"
    )
    alpha: Beta = Field(0.99, description="decay rate of the squared gradients of rmsprop")
    eps: float = Field(1e-8, gt=0, description="added to the denominator of adam, adamw, rmsprop and adagrad")
    keep: bool = Field(
        False, description="keep a client's momentum and step count for its next round instead of resetting them"
    )

    @model_validator(mode="after")
    def _default_betas(self) -> "OptimizerSettings":
        if self.name == "lion" and "betas" not in self.model_fields_set:
            self.__dict__["betas"] = LION_BETAS  # the section is frozen, and the field stays unset
        return self

    @model_validator(mode="after")
    def _without_constants(self) -> "OptimizerSettings":
        if self.name not in TORCH_OPTIMIZERS:
            return self
        if self.keep:
            raise refusal(f"training.optimizer.keep = true: {NOT_KEPT}")
        for name, field in type(self).model_fields.items():
            if name not in ("name", "lr", "clip") and getattr(self, name) != field.default:
                raise refusal(
                    f"training.optimizer.{name} = {getattr(self, name)!r}: an optimizer of torch.optim that is passed "
                    "as an object sets it itself; remove it here"
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle for worker processes, together with an optimizer that was passed as an object."""
        own = TORCH_OPTIMIZERS.get(self.name) or OWN_RULES.get(self.name)
        if own is None:
            return cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _settings_again, (self.name, own, self.__getstate__())


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
        self._rule = RULES[settings.name]
        self._decays = [settings.decay_norms or parameter.dim() > 1 for parameter in parameters]
        device = parameters[0].device if parameters else None
        allocate = allocate or (lambda name, shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
        self.count = allocate(
            "count", (), torch.float64
        )  # for Adam; float64, because 1 − 0.999^t loses digits in float32
        layout = Layout.of({str(i): p for i, p in enumerate(parameters)})
        moments = self._rule.moments + (self._rule.has_velocity and settings.momentum > 0)
        self._moments = [
            FlatState(
                layout, {dtype: allocate(f"{name} {dtype}", (size,), dtype) for dtype, size in layout.sizes.items()}
            )
            for name in MOMENTS[:moments]
        ]
        self._views = [list(moment.values()) for moment in self._moments]

    def reset(self) -> None:
        """Zero all state."""
        for tensor in self.state():
            tensor.zero_()

    def state(self) -> list[Tensor]:
        """Return all state that must be zeroed, kept or restored."""
        counted = [self.count] if self._rule.counts else []
        return [*counted, *(buffer for moment in self._moments for buffer in moment.buffers.values())]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step reads and writes besides the parameters."""
        return [self.count, *(view for views in self._views for view in views)]

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor | None, ...], lr: Tensor | float) -> None:
        """Take one step. Parameters without a gradient do not change, as in torch.optim."""
        used = [i for i, g in enumerate(gradients) if g is not None]
        if not used:
            return
        settings, rule = self.settings, self._rule
        parameters = [self.parameters[i] for i in used]
        grads: list[Tensor] = [g for g in gradients if g is not None]
        if settings.clip is not None:
            grads = clipped(grads, settings.clip)
        decayed = [j for j, i in enumerate(used) if self._decays[i]] if settings.weight_decay else []
        if decayed and rule.decoupled:
            foreach_mul_([parameters[j] for j in decayed], 1 - settings.weight_decay * lr)
        elif decayed:
            pairs = [grads[j] for j in decayed], [parameters[j] for j in decayed]
            for j, grad in zip(decayed, foreach_add(*pairs, alpha=settings.weight_decay), strict=True):
                grads[j] = grad
        if rule.counts:
            self.count.add_(1)
        moments = [[views[i] for i in used] for views in self._views]
        directions, rate = rule.directions(Update(settings, grads, moments, self.count, lr))
        descend_(parameters, directions, rate)


class Update(NamedTuple):
    """What a rule computes directions from: one entry per parameter in `grads` and in each of the moments."""

    settings: OptimizerSettings
    grads: list[Tensor]
    moments: list[list[Tensor]]
    number: Tensor
    """Number of this step, from 1."""
    lr: Tensor | float


Directions = tuple[list[Tensor], Tensor | float]
"""A direction for every parameter, and the step size."""


def _sgd(update: Update) -> Directions:
    return _with_momentum(update.settings, update.grads, update.moments), update.lr


def _adam(update: Update) -> Directions:
    settings, grads, (first, second), number, lr = update
    beta1, beta2 = settings.betas
    foreach_lerp_(first, grads, 1 - beta1)
    foreach_mul_(second, beta2)
    foreach_addcmul_(second, grads, grads, 1 - beta2)
    scale = (1 - beta2**number).sqrt().to(first[0].dtype)
    rate = (lr / (1 - beta1**number)).to(first[0].dtype)
    denominator = foreach_sqrt(second)
    foreach_div_(denominator, scale)
    foreach_add_(denominator, settings.eps)
    return list(foreach_div(first, denominator)), rate


def _rmsprop(update: Update) -> Directions:
    settings, grads, (squares, *velocity), _, lr = update
    foreach_mul_(squares, settings.alpha)
    foreach_addcmul_(squares, grads, grads, 1 - settings.alpha)
    return _with_momentum(settings, _over_root(grads, squares, settings.eps), velocity), lr


def _adagrad(update: Update) -> Directions:
    settings, grads, (squares,), _, lr = update
    foreach_addcmul_(squares, grads, grads, 1)
    return _over_root(grads, squares, settings.eps), lr


def _lion(update: Update) -> Directions:
    """Chen et al. (2023), Algorithm 2."""
    settings, grads, (first,), _, lr = update
    beta1, beta2 = settings.betas
    signs = list(foreach_sign(foreach_lerp(first, grads, 1 - beta1)))
    foreach_lerp_(first, grads, 1 - beta2)
    return signs, lr


def _with_momentum(
    settings: OptimizerSettings, directions: list[Tensor], velocity: Sequence[list[Tensor]]
) -> list[Tensor]:
    """Add directions to the velocity and return it; return them unchanged without momentum."""
    if not velocity:
        return directions
    foreach_mul_(velocity[0], settings.momentum)
    foreach_add_(velocity[0], directions)
    return velocity[0]


def _over_root(grads: list[Tensor], squares: list[Tensor], eps: float) -> list[Tensor]:
    """Return gradient / (√square + ε)."""
    denominator = foreach_sqrt(squares)
    foreach_add_(denominator, eps)
    return list(foreach_div(grads, denominator))


class Rule(NamedTuple):
    """How an optimizer turns gradients into directions."""

    directions: Callable[[Update], Directions]
    """Updates the moments and returns the directions."""
    moments: int = 0
    """Number of moments, without the velocity."""
    has_velocity: bool = False
    """Whether `momentum` adds a velocity, the last moment."""
    counts: bool = False
    """Whether the step count is used."""
    decoupled: bool = False
    """Whether weight decay scales the parameters instead of being added to the gradients."""


RULES = {
    "sgd": Rule(_sgd, has_velocity=True),
    "adam": Rule(_adam, moments=2, counts=True),
    "adamw": Rule(_adam, moments=2, counts=True, decoupled=True),
    "rmsprop": Rule(_rmsprop, moments=1, has_velocity=True),
    "adagrad": Rule(_adagrad, moments=1),
    "lion": Rule(_lion, moments=1, decoupled=True),
}


class OwnRule(Protocol):
    """An optimizer of yours, passed as `fedloom.run(optimizer=…)`: parameter ← parameter − lr · direction.

    Weight decay, clipping and `keep` of the recipe apply to it. It runs on every engine.

    Example:
        >>> class SignMomentum:
        ...     moments = 1
        ...
        ...     def direction(self, gradient, moments, count):
        ...         return moments[0].mul_(0.9).add_(gradient).sign()
    """

    moments: int
    """Number of tensors of state per parameter, at most 4. They are zero before the first step."""

    def direction(self, gradient: Tensor, moments: list[Tensor], count: Tensor) -> Tensor:
        """Update the moments in place and return the direction of one parameter.

        Args:
            gradient: The gradient.
            moments: The parameter's state, each of the gradient's shape.
            count: Number of this step from 1, a 0-d float64 tensor.
        """
        ...


OWN_RULES: dict[str, OwnRule] = {}
"""Optimizers that were passed as objects, by name; `RULES` has them too."""
TorchFactory = Callable[[list[Tensor]], torch.optim.Optimizer]
TORCH_OPTIMIZERS: dict[str, TorchFactory] = {}
"""Functions that make a torch.optim optimizer of parameters, by name; passed as objects."""


def add_own(name: str, thing: OwnRule | TorchFactory) -> None:
    """Register an optimizer that was passed as an object."""
    if not hasattr(thing, "direction"):
        TORCH_OPTIMIZERS[name] = thing
        return
    own = OWN_RULES[name] = cast(OwnRule, thing)

    def directions(update: Update) -> Directions:
        _, grads, moments, number, lr = update
        return [own.direction(grad, [m[i] for m in moments], number) for i, grad in enumerate(grads)], lr

    RULES[name] = Rule(directions, moments=own.moments, counts=True)


def _settings_again(name: str, own: OwnRule | TorchFactory, state: Any) -> OptimizerSettings:
    add_own(name, own)
    settings = OptimizerSettings.model_construct()
    settings.__setstate__(state)
    return settings


def _refuse_unknown(name: str) -> None:
    if name not in RULES and name not in TORCH_OPTIMIZERS:
        refuse_object("training.optimizer.name", name)
        raise UserError(f"is unknown; {nearest(name, [known for known in RULES if not known.startswith(OBJECT)])}")


def clipped(grads: list[Tensor], most: float) -> list[Tensor]:
    """Scale gradients so that their joint L2 norm is at most `most`, as torch.nn.utils.clip_grad_norm_ does."""
    norm = torch.stack(foreach_norm(grads)).norm()
    return list(foreach_mul(grads, (most / (norm + 1e-6)).clamp(max=1)))


def descend_(parameters: list[Tensor], directions: list[Tensor], lr: Tensor | float) -> None:
    """Update in place: parameter ← parameter − lr · direction. Gradients must be disabled."""
    foreach_sub_(parameters, foreach_mul(directions, lr))
