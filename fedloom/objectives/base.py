"""What is trained on: labels, or two views of the same image. A method asks its client's objective and need not know.

An objective puts its head on the network (`equip`): a classifier, or a projector. A self-supervised one has `encode`,
the representations of two views, and `contrast`, the loss between them; apart, so that a method can change
representations in between (FedStyle). `contrast` is `project`, then `compare`: APFL mixes projections in between.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast, dataclass_transform

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.batches import Batch
from fedloom.core.options import Count, declared, validated
from fedloom.core.registry import Registry, subclass_of
from fedloom.core.state import copy_
from fedloom.models import SplitModel


class Views(NamedTuple):
    """Representations of a batch's two views, by the network in training and by its slow copy (where there is one)."""

    online: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor] | None = None


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss for a network on a batch. Known by its class name in lower case."""

    supervised: ClassVar[bool] = False
    name: ClassVar[str] = "objective"

    def __init_subclass__(cls, abstract: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.name = cls.__name__.lower()
        if not abstract:
            OBJECTIVES.add(cls.name, cls)

    def equip(self, model: SplitModel) -> SplitModel:
        """Gives the network the head that this objective trains."""
        raise NotImplementedError

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """The loss of a network on a batch."""
        raise NotImplementedError

    def at(self, model: SplitModel, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The loss of a network with these values for its parameters: differentiable in them, buffers its own."""
        named = {f"model.{name}": value for name, value in weights.items()}
        loss: Tensor = functional_call(_Scored(self, model), named, (batch,))
        return loss

    def begin(self, model: SplitModel) -> None:
        """What is due when a client takes part for the first time, with a network that others may have trained."""

    def follow(self, model: SplitModel) -> None:
        """What is due after every optimizer step of a network."""


class _Scored(nn.Module):
    """A network together with its objective, as one module."""

    def __init__(self, objective: Objective, model: SplitModel):
        super().__init__()
        self.objective, self.model = objective, model

    def forward(self, batch: Batch) -> Tensor:
        return self.objective(self.model, batch)


class SelfSupervised(Objective, abstract=True):
    """A loss between two views of the same images; the head is a two-layer projector."""

    hidden: Count = 256
    """Width inside the projector."""
    width: Count = 128
    """Width of the projection."""

    def equip(self, model: SplitModel) -> SplitModel:
        """A projector in place of the classifier."""
        model.head = mlp(model.features, self.hidden, self.width)
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Encodes both views, contrasts them."""
        return self.contrast(model, self.encode(model, batch))

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Representations of two views."""
        first, second = batch.views
        return Views((model.extractor(first), model.extractor(second)))

    def contrast(self, model: SplitModel, views: Views, *, remember: bool = True) -> Tensor:
        """The loss between two views; with `remember`, an objective that has a memory adds them to it."""
        return self.compare(model, self.project(model, views), remember=remember)

    def project(self, model: SplitModel, views: Views) -> Views:
        """Projections of representations, by the network and by its slow copy (where there is one)."""
        first, second = views.online
        slow = None if views.target is None else cast(Slow, model.target).project(views.target)
        return Views((model.head(first), model.head(second)), slow)

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """The loss between two views' projections."""
        raise NotImplementedError


def mlp(features: int, hidden: int, width: int) -> nn.Sequential:
    """Two layers with a ReLU between."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, width))


class Slow(nn.Module):
    """A copy of a network that follows it as a moving average (BYOL's target, MoCo's key encoder).

    It stays with the client (`stays_local`), no gradient reaches it, and it moves after every step.
    """

    stays_local = True

    def __init__(self, extractor: nn.Module, projector: nn.Module, momentum: float):
        super().__init__()
        self.momentum = momentum
        self.extractor, self.projector = _frozen(extractor), _frozen(projector)

    @torch.no_grad()
    def forward(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Representations, without gradient."""
        return tuple(self.extractor(view) for view in views)

    @torch.no_grad()
    def project(self, representations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projections, without gradient."""
        first, second = representations
        return self.projector(first), self.projector(second)

    @torch.no_grad()
    def start_at(self, extractor: nn.Module, projector: nn.Module) -> None:
        """slow ← network, batch-norm statistics included."""
        for mine, theirs in ((self.extractor, extractor), (self.projector, projector)):
            copy_(mine, dict(theirs.named_parameters()) | dict(theirs.named_buffers()))

    @torch.no_grad()
    def follow(self, extractor: nn.Module, projector: nn.Module) -> None:
        """slow ← m · slow + (1 − m) · network, over its parameters."""
        for mine, theirs in ((self.extractor, extractor), (self.projector, projector)):
            own = dict(mine.named_buffers())
            for name, parameter in theirs.named_parameters():
                own[name].lerp_(parameter, 1 - self.momentum)


def _frozen(module: nn.Module) -> nn.Module:
    """A copy whose parameters are buffers, so that no optimizer and no proximal term sees them."""
    module = deepcopy(module)
    for inner in module.modules():
        for name, parameter in list(inner._parameters.items()):
            del inner._parameters[name]
            inner.register_buffer(name, None if parameter is None else parameter.detach().clone())
    return module


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective.name", "a subclass of fedloom.objectives.Objective", subclass_of(Objective),
    package="fedloom.objectives", group="fedloom.objectives",
)  # fmt: skip


def get(name: str, **parameters: Any) -> Objective:
    """An objective with its hyperparameters, validated."""
    found = OBJECTIVES.find(name)
    return found(**validated(declared(found), parameters, "objective", name))
