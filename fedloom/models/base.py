"""What a model is here: an extractor, a head, names for the layers between; and how one is built by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from torch import Tensor, nn

from fedloom import plugins
from fedloom.errors import UserError, nearest

Shape = tuple[int, int, int]
"""Channels, height and width of one image."""


class SplitModel(nn.Module):
    """An extractor (input → representation) and a head (representation → logits).

    A registered network takes `(shape, classes)` and its own options as keywords; every option has a default.
    """

    name: ClassVar[str] = ""
    smallest: ClassVar[int] = 1
    """The least height and width, in pixels, that leave something to represent."""
    taps: tuple[str, ...] = ()
    """Names, from the model's root, of the submodules whose outputs are its layers, in order."""

    extractor: nn.Module
    head: nn.Module
    features: int
    """The width of the representation."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        return self.head(self.extractor(x))


def tapped(model: nn.Module, x: Tensor, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    """The model's output and the flattened outputs of these submodules, from one forward pass."""
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            choices = [known for known in modules if known and known.count(".") < 2]
            raise UserError(f"layer '{name}' is not in {type(model).__name__}: {nearest(name, choices)}")
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


Network = TypeVar("Network", bound=type[SplitModel])

_registry: dict[str, type[SplitModel]] = {}
MODELS = plugins.Kind(
    "fedloom.models", "model", "a subclass of fedloom.models.SplitModel",
    lambda thing: isinstance(thing, type) and issubclass(thing, SplitModel) and thing is not SplitModel,
)  # fmt: skip


def register(name: str) -> Callable[[Network], Network]:
    """Makes a network known under this name."""

    def add(network: Network) -> Network:
        if name in _registry and _registry[name].__module__.startswith("fedloom."):
            raise UserError(f"a model is already registered as '{name}': choose another name")
        network.name = name
        _registry[name] = network
        return network

    return add


def models() -> dict[str, str]:
    """Every registered network by name, with the first line of its docstring."""
    return {name: (network.__doc__ or "").split("\n")[0] for name, network in sorted(_registry.items())}


def build(name: str, *, shape: Shape, classes: int, **options: Any) -> SplitModel:
    """The network of this name for images of this shape, its weights drawn from torch's global generator."""
    check(name, options)
    network = _network(name)
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"model '{name}' needs a shape of channels, height and width, each at least 1, not {shape}")
    if min(shape[1:]) < network.smallest:
        least = network.smallest
        raise UserError(f"model '{name}' needs images of at least {least}×{least} pixels: the shape is {shape}")
    if classes < 1:
        raise UserError(f"model '{name}' needs at least one class, not {classes}")
    return network(shape, classes, **options)


def _network(name: str) -> type[SplitModel]:
    found: type[SplitModel] | None = _registry.get(name) or plugins.find(MODELS, name)
    if found is None:
        choice = nearest(name, [*_registry, *plugins.names(MODELS)])
        raise UserError(f"model '{name}' is unknown: {choice}, or one of yours: path/to/file.py:Name")
    return found


def _options(network: type[SplitModel]) -> dict[str, inspect.Parameter]:
    """The network's own options."""
    parameters = inspect.signature(network).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def check(model: str, options: Mapping[str, Any]) -> None:
    """Refuses an unknown model, an unknown option or a wrong value, before anything is built."""
    known = _options(_network(model))
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise UserError(f"model '{model}' has no option '{option}': {hint}")
        if wanted := _wanted(value, known[option]):
            raise UserError(f"option '{option}' of model '{model}' is {wanted}, not {value!r}")


def _wanted(value: Any, option: inspect.Parameter) -> str | None:
    """What a value should have been, told by the option's type or default: a choice, a switch, a width, a share."""
    if get_origin(option.annotation) is Literal:
        choices = get_args(option.annotation)
        return None if value in choices else " or ".join(map(str, choices))
    default = option.default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if number and isinstance(value, int) and value >= 1 else "a whole number of at least 1"
    if isinstance(default, float):
        return None if number and 0 <= value < 1 else "a number in [0, 1)"
    return None
