"""Plain networks: any `nn.Module` as a network with an extractor and a head."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedloom.core.errors import UserError, brief, nearest
from fedloom.core.options import Declaration, option
from fedloom.core.protocols import Shape
from fedloom.core.rng import keyed
from fedloom.models.base import SplitModel
from fedloom.models.trial import TrialRun

GIVEN = ("shape", "classes", "num_classes", "in_channels")
"""Parameters of a plain network's constructor that fedloom fills in; all others are options."""


class PlainModel(SplitModel):
    """A plain network, split at its last layer.

    `extractor` is the network with `nn.Identity` in place of that layer, so that code in its `forward` still runs.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module, features: int, place: str, taps: tuple[str, ...]):
        super().__init__()
        self.extractor, self.head, self.features, self.taps = extractor, head, features, taps
        self.place = place
        """Name of the head in the plain network; empty if the whole network is the head."""

    def published_name(self, name: str) -> str:
        """Return the name of a tensor in the plain network's state dict."""
        part, _, rest = name.partition(".")
        return f"{self.place}.{rest}".removeprefix(".") if part == "head" else rest


def disable_fast_attention(module: nn.Module) -> None:
    """Turn off torch's fast path of attention in this process, if a network has attention layers.

    It is taken in evaluation only, rounds differently, and ignores low-rank adapters.
    """
    if any(isinstance(inner, nn.MultiheadAttention) for inner in module.modules()):
        torch.backends.mha.set_fastpath_enabled(False)


def split_model(
    module: nn.Module,
    head: str | None = None,
    *,
    shape: Shape | None = None,
    classes: int | None = None,
    taps: Sequence[str] = (),
) -> SplitModel:
    """Split a plain network into an extractor and a head, for methods that share, keep or replace them separately.

    The extractor is a copy of the network in which `nn.Identity` replaces the last layer, so `extractor(x)` is the
    input of that layer. Dropout modules are replaced by `fedloom.core.rng.Dropout`, whose random numbers do not depend
    on the engine.

    Args:
        module: The network. It maps images [B, C, H, W] to logits [B, classes]. It is not changed.
        head: Dotted name of its last layer, such as `fc` or `classifier.6`. Default: the last `nn.Linear`, if it has
            as many outputs as there are classes and is the last layer that runs. An `nn.Linear` is a head without an
            extractor.
        shape: Channels, height and width of images. With it, the result is compared with the original network on
            made-up images. Required if `head` is not given or is not a linear layer.
        classes: Number of classes. Default: the width of the network's output.
        taps: Dotted names of the layers that layer-wise methods compare. Default: the network's direct children.

    Returns:
        A network with `extractor`, `head` and `features`; its output is that of the original.

    Raises:
        UserError: There is no such layer, no obvious last layer, or the network cannot be split there.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> split_model(net, shape=(1, 8, 8)).features
        32
    """
    kind = type(module).__name__
    refuse_other_parameters(module)
    if isinstance(module, nn.Linear) and head is None:  # logistic regression: the inputs are the representation
        return _only_a_head(module, shape, classes)
    if shape is None and head is None:
        raise UserError(f"split_model({kind}): give the name of its last layer (head='fc'), or the shape of images")
    run = None if shape is None else TrialRun(module, shape)
    if run is not None:
        run.refuse_other_outputs(classes)
    place = _last_layer(module, run) if head is None else head
    _refuse_missing(module, [place, *taps])
    disable_fast_attention(module)
    extractor = deepcopy(module)
    last = keyed(extractor.get_submodule(place))
    parent, _, name = place.rpartition(".")
    extractor.get_submodule(parent)._modules[name] = nn.Identity()
    extractor = keyed(extractor)
    if {id(p) for p in last.parameters()} & {id(p) for p in extractor.parameters()}:
        raise UserError(f"model.head = '{place}': the layer shares parameters with the rest of {kind}; untie them")
    names = tuple(taps) or (() if run is None else tuple(n for n in run.children if n != place))
    split = PlainModel(extractor, last, _width(last), place, tuple(f"extractor.{name}" for name in names))
    if run is not None:
        split.features = run.checked_features(split)
        run.refuse_random_numbers(split)
    return split


def _only_a_head(module: nn.Linear, shape: Shape | None, classes: int | None) -> SplitModel:
    if shape is not None:
        TrialRun(module, shape).refuse_other_outputs(classes)
    return PlainModel(nn.Identity(), deepcopy(module), module.in_features, "", ())


def refuse_other_parameters(module: nn.Module) -> None:
    """Raise a UserError if parameters have no shape yet, or are not float32."""
    for name, parameter in module.named_parameters():
        kind = type(module).__name__
        if is_lazy(parameter):
            raise UserError(
                f"model: {kind} has a layer without a shape, whose parameter is '{name}'; call the network once "
                "with a batch of inputs, or give all sizes"
            )
        if parameter.dtype != torch.float32:
            raise UserError(
                f"model: the parameter '{name}' of {kind} is {parameter.dtype}; convert the network to float32 with "
                ".float() (engine.precision sets the precision of training)"
            )


def options_of(network: Callable[..., nn.Module]) -> Declaration:
    """Return the options of a plain network: all named parameters of its constructor, or of a function.

    `shape`, `classes`, `num_classes` and `in_channels` are left out, since fedloom fills them in.
    """
    source: Any = getattr(network, "__init__") if isinstance(network, type) else network  # noqa: B009
    try:
        hints = get_type_hints(source, include_extras=True)
    except Exception:  # an annotation that only a type checker can evaluate
        hints = {}
    return {p.name: option(hints.get(p.name, Any), p.default) for p in _parameters(network) if p.name not in GIVEN}


def build_plain(
    network: Callable[..., Any], name: str, shape: Shape, classes: int, options: Mapping[str, Any], head: str | None
) -> SplitModel:
    """Build a plain network and split it.

    Args:
        network: A subclass of `nn.Module`, or a function that returns a module.
        name: Its name in the recipe, for error messages.
        shape: Channels, height and width of images.
        classes: Number of classes.
        options: Further arguments.
        head: Dotted name of its last layer; default: found automatically.

    Raises:
        UserError: The network cannot be built, run or split.
    """
    known = dict(zip(GIVEN, (shape, classes, classes, shape[0]), strict=True))
    parameters = _parameters(network)
    given = {p.name: known[p.name] for p in parameters if p.name in GIVEN}
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in {*given, *options}:
            raise UserError(
                f"model.{parameter.name}: {name} needs it; set it in the recipe, or name the parameter shape, classes, "
                "num_classes or in_channels"
            )
    try:
        module = network(**given, **options)
    except UserError:
        raise
    except Exception as error:
        called = ", ".join(f"{key}={value!r}" for key, value in {**given, **options}.items())
        raise UserError(
            f"model.name = '{name}': the call with {called or 'no arguments'} failed: {brief(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model.name = '{name}': it returned a {type(module).__name__}, but must return an nn.Module")
    if isinstance(module, SplitModel):
        if head is not None:
            raise UserError(f"model.head = '{head}': {name} returned a SplitModel, which has a head; remove the field")
        return module
    return split_model(module, head, shape=shape, classes=classes)


def _parameters(network: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the named parameters of a function or constructor, without *args and **kwargs."""
    found = inspect.signature(network).parameters.values()
    return [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _last_layer(module: nn.Module, run: TrialRun | None) -> str:
    """Return the name of the last linear layer, if it gives the output and is the last module that runs."""
    assert run is not None
    linear = {name: inner for name, inner in module.named_modules() if isinstance(inner, nn.Linear)}
    fitting = [name for name, inner in linear.items() if inner.out_features == run.output.shape[1]]
    if fitting and run.leaves and run.leaves[-1] is linear[fitting[-1]] and fitting[-1]:
        return fitting[-1]
    if run.leaves and isinstance(run.leaves[-1], nn.Softmax | nn.LogSoftmax | nn.Sigmoid):
        raise UserError(
            f"model: {run.kind} ends with a {type(run.leaves[-1]).__name__}, but must return logits; remove this layer"
        )
    if fitting:
        offers = ", ".join(f"'{name}'" for name in fitting)
        raise UserError(
            f"model.head: {run.kind} has no obvious last layer, because none of its linear layers with "
            f"{run.output.shape[1]} outputs runs last; name it, for example one of {offers}"
        )
    offers = ", ".join(f"'{n}' ({inner.in_features} → {inner.out_features})" for n, inner in linear.items())
    raise UserError(
        f"model.head: {run.kind} has no linear layer with {run.output.shape[1]} outputs; name its last layer"
        + (f" (linear layers: {offers})" if offers else "")
    )


def _refuse_missing(module: nn.Module, names: Sequence[str]) -> None:
    modules = dict(module.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UserError(
                f"model.head = '{name}': {type(module).__name__} has no such layer: "
                f"{nearest(name, [known for known in modules if known])}"
            )


def _width(head: nn.Module) -> int:
    """Return the input width of a head: that of its first linear layer, or 0 if it has none."""
    return next((m.in_features for m in head.modules() if isinstance(m, nn.Linear)), 0)
