"""Base class of networks, and the registry of networks."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import isfunction
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from fedloom.core.errors import UserError, nearest
from fedloom.core.registry import Registry


class SplitModel(nn.Module):
    """Base class of networks: an extractor (input → representation) and a head (representation → logits).

    To write a network, subclass it and set `extractor`, `head` and `features` in `__init__`, which takes
    `(shape, classes)` and options as keyword-only parameters with defaults. Options become fields of the recipe's
    `model` section. Their annotations are validated and may include bounds:
    `slope: Annotated[float, Field(gt=0)] = 0.2`, with pydantic's `Field`.

    Extractor and head must be separate modules, since methods share, keep or replace them separately. Use
    `fedloom.core.rng.Dropout` instead of `torch.nn.Dropout`: its random numbers do not depend on the engine.

    Example:
        @register("tiny")
        class Tiny(SplitModel):
            taps = ("extractor.1",)  # the layers that layer-wise methods compare

            def __init__(self, shape, classes, *, features: int = 32):
                super().__init__()
                self.features = features
                self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), features), nn.ReLU())
                self.head = nn.Linear(features, classes)
    """

    name: ClassVar[str] = ""
    """Name in recipes; set by `register`."""
    images: ClassVar[bool] = True
    """Whether inputs must be images; False for networks that take samples of any shape."""
    smallest: ClassVar[int] = 1
    """Minimum height and width of images, in pixels."""
    taps: tuple[str, ...] = ()
    """Names of the submodules whose outputs layer-wise methods (FedIntR, FedCKA) compare, in order."""

    extractor: nn.Module
    """Maps images [B, C, H, W] to representations [B, features]."""
    head: nn.Module
    """Maps representations [B, features] to logits [B, classes]."""
    features: int
    """Width of the representation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, classes] of images [B, C, H, W]."""
        return self.head(self.extractor(x))

    def published_name(self, name: str) -> str:
        """Return the name that one of this network's tensors has in published state dicts, for `model.weights`."""
        return name.removeprefix("extractor.")


def tapped(model: nn.Module, x: Tensor, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    """Return a model's output and the outputs of some of its submodules, from one forward pass.

    Args:
        model: The model.
        x: Its input.
        names: Names of the submodules, as in `model.named_modules()`.

    Returns:
        The model's output, and the output of each submodule, flattened to [B, ·].

    Raises:
        UserError: The model has no submodule of a name.
    """
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            choices = [known for known in modules if known and known.count(".") < 2]
            raise UserError(f"layer '{name}': {type(model).__name__} has no such layer: {nearest(name, choices)}")
    outputs: dict[str, Tensor] = {}
    hooks = [modules[name].register_forward_hook(partial(_keep, outputs, name)) for name in names]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return logits, [outputs[name] for name in names]


def _keep(outputs: dict[str, Tensor], name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
    outputs[name] = output.flatten(1)


Model = TypeVar("Model", bound=type[SplitModel])

Network = Callable[..., nn.Module]
"""What `model.name` refers to: a subclass of `SplitModel` or of `nn.Module`, or a function that returns a module."""


def is_split(network: Network) -> bool:
    """Return whether a network is a subclass of `SplitModel`, as opposed to a plain `nn.Module` or a function."""
    return isinstance(network, type) and issubclass(network, SplitModel)


def _is_buildable(thing: Any) -> bool:
    is_module = isinstance(thing, type) and issubclass(thing, nn.Module)
    return (is_module and thing is not SplitModel) or isfunction(thing)


MODELS: Registry[Network] = Registry(
    "model.name", "an nn.Module or a fedloom.models.SplitModel (a class, or a function that returns one)",
    _is_buildable, package="fedloom.models", group="fedloom.models",
)  # fmt: skip


def register(name: str) -> Callable[[Model], Model]:
    """Return a class decorator that registers a network under a name.

    Args:
        name: The name, for `model.name` in recipes and for `build`.

    Returns:
        The decorator, which returns the class unchanged except for its `name`.

    Example:
        @register("tiny")
        class Tiny(SplitModel): ...
    """

    def add(network: Model) -> Model:
        network.name = name
        MODELS.add(name, network)
        return network

    return add
