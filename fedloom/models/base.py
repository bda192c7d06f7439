"""Base class of networks, and functions to register and build them by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.options import declared, validated
from fedloom.core.protocols import Shape
from fedloom.core.registry import Registry, subclass_of


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

MODELS: Registry[type[SplitModel]] = Registry(
    "model.name", "a subclass of fedloom.models.SplitModel", subclass_of(SplitModel), package="fedloom.models",
    group="fedloom.models",
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


@dataclass(frozen=True)
class Factory:
    """Builder of networks of one name and options. Initial weights are drawn from torch's global generator.

    Example:
        >>> Factory("mlp", {"hidden": 32})(shape=(1, 8, 8), classes=10).features
        64
    """

    name: str = "mlp"
    """A registered network or `path/to/file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the network; those not given have their defaults."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for worker processes of the same user, with the user's consent to run a file's code."""
        return _unpickled, (self.name, dict(self.options), trusted_code.hashes(self.name))

    def __call__(self, shape: Shape, classes: int) -> SplitModel:
        """Build the network for images of a shape.

        Args:
            shape: Channels, height and width.
            classes: Number of classes.

        Returns:
            A freshly initialised network.

        Raises:
            UserError: The name or an option is unknown, a value is invalid, or images are too small for the network.
        """
        options = check(self.name, self.options)
        network = MODELS.find(self.name)
        if min(shape, default=0) < 1 or (network.images and len(shape) != 3):
            what = "images (channels, height, width)" if network.images else "inputs"
            remedy = "; choose mlp, which takes inputs of any shape" if network.images else ""
            raise UserError(f"model '{self.name}': needs {what}, but the shape of a sample is {tuple(shape)}{remedy}")
        if network.images and min(shape[1:]) < network.smallest:
            least = network.smallest
            raise UserError(
                f"model '{self.name}': needs images of at least {least}×{least} pixels, but the shape is {shape}"
            )
        if classes < 1:
            raise UserError(f"model '{self.name}': classes = {classes}: must be at least 1")
        return network(shape, classes, **options)


def _unpickled(name: str, options: Mapping[str, Any], allowed: Mapping[str, str]) -> Factory:
    trusted_code.allow_hashes(allowed)
    return Factory(name, options)


def build(name: str, *, shape: Shape, classes: int, **options: Any) -> SplitModel:
    """Build a network from its name.

    Args:
        name: A registered network or `path/to/file.py:Class`. The file is imported, which runs its code.
        shape: Channels, height and width of the images.
        classes: Number of classes.
        **options: Options of the network; those not given have their defaults.

    Returns:
        A network with weights drawn from torch's global generator.

    Raises:
        UserError: The name or an option is unknown, a value is invalid, or images are too small for the network.

    Example:
        >>> build("mlp", shape=(1, 8, 8), classes=10, hidden=32).features
        64
    """
    trusted_code.allow(name)
    return Factory(name, options)(shape, classes)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of a network without building it.

    Args:
        name: A registered network or `path/to/file.py:Class`.
        options: Its options.

    Returns:
        The options, converted to their annotated types.

    Raises:
        UserError: The name or an option is unknown, or a value is invalid.
    """
    return validated(declared(MODELS.find(name)), options, "model", name)
