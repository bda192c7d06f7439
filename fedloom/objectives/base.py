"""Training objectives: a loss of a network on a batch, with labels or with two views of each image.

Methods call `client.objective(model, batch)`, so that the same method trains with and without labels. An objective
replaces the network's head in `equip`: by a classifier or by a projector. A self-supervised objective has three steps:
`encode` computes the representations of two views, `project` their projections, `compare` the loss between these;
`contrast` is the last two. Methods can change the values between the steps: FedStyle changes representations, APFL
projections.

An objective decides four things about a task, and another kind of target (a number, a survival time) has to decide the
same four: how many outputs a head has (`outputs`), the loss (`__call__`, `classify`), how outputs become predictions
(`class_logits`), and what is counted as a score (`core.scores`: classes, or the labels of `multilabel`). Targets that
are not classes also need a type in `core.dataset` and figures in `core.metrics`.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast, dataclass_transform

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.options import Count, declared, validated
from fedloom.core.registry import Registry, subclass_of
from fedloom.core.state import as_buffers, copy_
from fedloom.models import SplitModel


class Views(NamedTuple):
    """Representations or projections of a batch's two views, by the network in training and by its target network."""

    online: tuple[Tensor, Tensor]
    """First and second view, by the network in training."""
    target: tuple[Tensor, Tensor] | None = None
    """First and second view, by the target network (BYOL, MoCo); None for objectives without one."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Objective:
    """Base class of objectives: a loss of a network on a batch.

    A subclass is registered under its class name in lower case (`objective.name` in a recipe). Annotated fields are its
    hyperparameters. Pass `abstract=True` in the class statement for a base class that is not registered.

    Example:
        class Focal(Labels):  # objective: {name: focal, gamma: 1.0}
            gamma: float = 2.0

            def classify(self, logits, labels):
                loss = cross_entropy(logits, labels, reduction="none")
                return (1 - exp(-loss)) ** self.gamma * loss
    """

    supervised: ClassVar[bool] = False
    """Whether the objective reads labels."""
    multilabel: ClassVar[bool] = False
    """Whether a sample can have several labels, given as [N, L] of 0 and 1."""
    name: ClassVar[str] = "objective"
    """Name in recipes; set from the class name."""

    def __init_subclass__(cls, abstract: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.name = cls.__name__.lower()
        if not abstract:
            OBJECTIVES.add(cls.name, cls)

    @classmethod
    def kind(cls) -> str:
        """Return what the objective learns from, as methods name it in `learns_from`."""
        return "views" if not cls.supervised else "multilabel" if cls.multilabel else "labels"

    def outputs(self, classes: int) -> int:
        """Return the number of outputs of a head. The default is one per class or label.

        Args:
            classes: Number of classes, or of labels if a sample can have several.
        """
        return classes

    def class_logits(self, outputs: Tensor) -> Tensor:
        """Return one logit per class or label, for predictions. The default returns the outputs unchanged.

        Args:
            outputs: Outputs of a head or of a method's `predict`.

        Returns:
            Logits [B, classes]: the softmax gives the probabilities of classes, the sigmoid those of several labels.
        """
        return outputs

    def equip(self, model: SplitModel) -> SplitModel:
        """Give a network the head that this objective trains.

        Args:
            model: A freshly built network; changed in place.

        Returns:
            The same network.
        """
        raise NotImplementedError

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the loss of a network on a batch.

        Args:
            model: A network that `equip` has prepared.
            batch: The samples: `batch.x` and `batch.y`, or `batch.views`.

        Returns:
            The loss, a scalar or one value per sample [B].
        """
        raise NotImplementedError

    def classify(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits, for supervised methods that compute the logits themselves.

        Args:
            logits: Outputs of the classifier [B, outputs].
            labels: `batch.y`: classes [B], or labels [B, L].

        Returns:
            The loss, as `__call__` returns it. The default is the cross-entropy.
        """
        return cross_entropy(logits, labels)

    def at(self, model: SplitModel, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Compute the loss of a network with other values for its parameters.

        Args:
            model: The network, which provides the buffers and all parameters that `weights` does not name.
            weights: Values by parameter name; the loss is differentiable with respect to them.
            batch: The samples.

        Returns:
            The loss, as `__call__` returns it.
        """
        named = {f"model.{name}": value for name, value in weights.items()}
        loss: Tensor = functional_call(_Scored(self, model), named, (batch,))
        return loss

    def begin(self, model: SplitModel) -> None:
        """Prepare a network when a client takes part for the first time (a target network starts from it)."""

    def follow(self, model: SplitModel) -> None:
        """Update state of the objective after each optimizer step of a network (a target network)."""


class _Scored(nn.Module):
    """A network and its objective as one module, for `functional_call`."""

    def __init__(self, objective: Objective, model: SplitModel):
        super().__init__()
        self.objective, self.model = objective, model

    def forward(self, batch: Batch) -> Tensor:
        return self.objective(self.model, batch)


class SelfSupervised(Objective, abstract=True):
    """Base class of objectives without labels: a loss between two views of each image, on a two-layer projector."""

    hidden: Count = 256
    """Hidden width of the projector."""
    width: Count = 128
    """Output width of the projector."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Replace the classifier by a projector."""
        model.head = mlp(model.features, self.hidden, self.width)
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the loss between two views of a batch."""
        return self.contrast(model, self.encode(model, batch))

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Return the representations of two views of a batch."""
        first, second = batch.views
        return Views((model.extractor(first), model.extractor(second)))

    def contrast(self, model: SplitModel, views: Views, *, remember: bool = True) -> Tensor:
        """Compute the loss between representations of two views; with `remember`, MoCo adds the keys to its queue."""
        return self.compare(model, self.project(model, views), remember=remember)

    def project(self, model: SplitModel, views: Views) -> Views:
        """Return the projections of representations, by the network and by its target network if there is one."""
        first, second = views.online
        slow = None if views.target is None else cast(Slow, model.target).project(views.target)
        return Views((model.head(first), model.head(second)), slow)

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Compute the loss between projections of two views; with `remember`, MoCo adds the keys to its queue."""
        raise NotImplementedError


def mlp(features: int, hidden: int, width: int) -> nn.Sequential:
    """Return two linear layers with a ReLU between: features → hidden → width."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, width))


class Slow(nn.Module):
    """Target network: a moving average of a network (BYOL's target, MoCo's key encoder).

    It is updated after every step, never sent to the server (`stays_local`), and no gradient flows into it.
    """

    stays_local = True

    def __init__(self, extractor: nn.Module, projector: nn.Module, momentum: float):
        super().__init__()
        self.momentum = momentum
        self.extractor, self.projector = _frozen(extractor), _frozen(projector)

    @torch.no_grad()
    def forward(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the representations of views, without gradient."""
        return tuple(self.extractor(view) for view in views)

    @torch.no_grad()
    def project(self, representations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the projections of representations, without gradient."""
        first, second = representations
        return self.projector(first), self.projector(second)

    @torch.no_grad()
    def start_at(self, extractor: nn.Module, projector: nn.Module) -> None:
        """Copy the network's parameters and batch-norm statistics into this one."""
        for mine, theirs in ((self.extractor, extractor), (self.projector, projector)):
            copy_(mine, dict(theirs.named_parameters()) | dict(theirs.named_buffers()))

    @torch.no_grad()
    def follow(self, extractor: nn.Module, projector: nn.Module) -> None:
        """Update the parameters: target ← m · target + (1 − m) · network."""
        for mine, theirs in ((self.extractor, extractor), (self.projector, projector)):
            own = dict(mine.named_buffers())
            for name, parameter in theirs.named_parameters():
                own[name].lerp_(parameter, 1 - self.momentum)


def _frozen(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters are buffers, so that optimizers and proximal terms do not include them."""
    module = deepcopy(module)
    as_buffers(module)
    return module


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective.name", "a subclass of fedloom.objectives.Objective", subclass_of(Objective),
    package="fedloom.objectives", group="fedloom.objectives",
)  # fmt: skip


def get(name: str, **parameters: Any) -> Objective:
    """Make an objective from its name and hyperparameters.

    Args:
        name: A registered objective or `path/to/file.py:Class`.
        **parameters: Hyperparameters; those not given have their defaults.

    Returns:
        The objective.

    Raises:
        UserError: The name or a hyperparameter is unknown, or a value is invalid.

    Example:
        >>> get("simclr", tau=0.1).tau
        0.1
    """
    found = OBJECTIVES.find(name)
    return found(**validated(declared(found), parameters, "objective", name))
