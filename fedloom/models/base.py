"""What a model is here: an extractor, a head, names for the layers between; and how one is built by name."""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from fedloom import plugins
from fedloom.errors import UserError, nearest

Shape = tuple[int, int, int]
"""Channels, height and width of one image."""
Width = Annotated[int, Field(ge=1)]
"""An option that counts units or channels."""
Share = Annotated[float, Field(ge=0, lt=1)]
"""An option that is a probability below one, such as dropout."""


class SplitModel(nn.Module):
    """An extractor (input → representation) and a head (representation → logits).

    A registered network takes `(shape, classes)` and its own options as keywords; every option has a default. The
    annotation of a number may bound it: `slope: Annotated[float, Field(gt=0)] = 0.2`, with pydantic's Field.
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
    """What a value should have been, told by the option's annotation and default: a choice, a switch, a number."""
    if get_origin(option.annotation) is Literal:
        choices = get_args(option.annotation)
        return None if value in choices else " or ".join(map(str, choices))
    default = option.default
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if not isinstance(default, int | float):
        return None
    field = FieldInfo.from_annotation(option.annotation)
    whole = isinstance(default, int) and field.annotation is not float
    limits = {sign: getattr(limit, sign) for limit in field.metadata for sign in _SIGNS if hasattr(limit, sign)}
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and -inf < value < inf
    if number and all(_SIGNS[sign](value, limit) for sign, limit in limits.items()):
        return None
    return ("a whole number" if whole else "a number") + _range(limits)


_SIGNS: dict[str, Callable[[Any, Any], bool]] = {sign: getattr(operator, sign) for sign in ("ge", "gt", "le", "lt")}


def _range(limits: Mapping[str, float]) -> str:
    """Bounds in words: " of at least 1", " in [0, 1)"."""
    if len(limits) == 2:
        opening, closing = "[" if "ge" in limits else "(", "]" if "le" in limits else ")"
        low, high = (limits.get(closed, limits.get(open)) for closed, open in (("ge", "gt"), ("le", "lt")))
        return f" in {opening}{low}, {high}{closing}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return "".join(f" {words[sign]} {limit}" for sign, limit in limits.items())
