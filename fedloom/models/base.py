"""What a model is here: an extractor, a head, names for the layers between; and how one is built by name."""

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


Model = TypeVar("Model", bound=type[SplitModel])

MODELS: Registry[type[SplitModel]] = Registry(
    "model.name", "a subclass of fedloom.models.SplitModel", subclass_of(SplitModel), package="fedloom.models",
    group="fedloom.models",
)  # fmt: skip


def register(name: str) -> Callable[[Model], Model]:
    """Makes a network known under this name."""

    def add(network: Model) -> Model:
        network.name = name
        MODELS.add(name, network)
        return network

    return add


@dataclass(frozen=True)
class Factory:
    """Builds the network of a name; weights are drawn from torch's global generator.

    >>> Factory("mlp", {"hidden": 32})(shape=(1, 8, 8), classes=10).features
    64
    """

    name: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles go to worker processes of this user, and take the user's consent to a file along."""
        return _unpickled, (self.name, dict(self.options), trusted_code.hashes(self.name))

    def __call__(self, shape: Shape, classes: int) -> SplitModel:
        """The network for images of this shape."""
        options = check(self.name, self.options)
        network = MODELS.find(self.name)
        if len(shape) != 3 or min(shape) < 1:
            raise UserError(
                f"model '{self.name}' needs a shape of channels, height and width, each at least 1, not {shape}"
            )
        if min(shape[1:]) < network.smallest:
            least = network.smallest
            raise UserError(
                f"model '{self.name}' needs images of at least {least}×{least} pixels: the shape is {shape}"
            )
        if classes < 1:
            raise UserError(f"model '{self.name}' needs at least one class, not {classes}")
        return network(shape, classes, **options)


def _unpickled(name: str, options: Mapping[str, Any], allowed: Mapping[str, str]) -> Factory:
    trusted_code.allow_hashes(allowed)
    return Factory(name, options)


def build(name: str, *, shape: Shape, classes: int, **options: Any) -> SplitModel:
    """A network by name: `build("mlp", shape=(1, 8, 8), classes=10, hidden=32)`; a file in the name is imported."""
    trusted_code.allow(name)
    return Factory(name, options)(shape, classes)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a network, validated before anything is built."""
    return validated(declared(MODELS.find(name)), options, "model", name)
