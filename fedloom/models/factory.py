"""Networks by name: built, split if they are plain, and loaded with weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.options import Declaration, declared, validated
from fedloom.core.protocols import Shape
from fedloom.core.registry import OBJECT
from fedloom.core.state import under
from fedloom.models.base import MODELS, Network, SplitModel, is_split
from fedloom.models.freezing import freeze, untrained_parts
from fedloom.models.lora import LoraSettings, add_adapters, from_rank
from fedloom.models.plain import build_plain, disable_fast_attention, options_of
from fedloom.models.projected import project
from fedloom.models.weights import load_weights

COMMON: Declaration = {
    "weights": (str, None),
    "freeze": (tuple[str, ...], ()),
    "lora": (Annotated[LoraSettings, BeforeValidator(from_rank)], None),
    "project": (Annotated[int, Field(ge=1)], None),
}
"""Options that every network has."""


@dataclass(frozen=True)
class Factory:
    """Builder of networks of one name and options. Initial weights are drawn from torch's global generator.

    Example:
        >>> Factory("mlp", {"hidden": 32})(shape=(1, 8, 8), classes=10).features
        64
    """

    name: str = "mlp"
    """A registered network or `path/to/file.py:Name` (a class, or a function that returns a network)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the network; those not given have their defaults. `head` names the last layer of a plain one."""

    @property
    def kinds(self) -> tuple["Factory", ...]:
        """The networks that clients have: this one. `NetworkPerClient` has several."""
        return (self,)

    def kind_of(self, client: int) -> int:
        """Return the number of a client's network in `kinds`."""
        return 0

    @property
    def title(self) -> str:
        """Name with the options that are set: `mlp (hidden 32)`."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for worker processes of the same user, with the user's consent to run a file's code.

        A network that was passed as an object is pickled too.
        """
        own = MODELS.get(self.name) if self.name.startswith(OBJECT) else None
        return _unpickled, (self.name, dict(self.options), trusted_code.hashes(self.name), own)

    def __call__(self, shape: Shape, classes: int) -> SplitModel:
        """Build the network for images of a shape, with the weights of `options["weights"]` if they are given.

        Args:
            shape: Channels, height and width.
            classes: Number of classes.

        Returns:
            A freshly initialised network.

        Raises:
            UserError: The name or an option is unknown, a value is invalid, images are too small for the network, or
                the weights cannot be loaded.
        """
        return self._built(shape, classes)[0]

    def notes(self, shape: Shape, classes: int) -> list[str]:
        """Return remarks for the user: what was loaded from a file of weights."""
        return self._built(shape, classes)[1] if self.options.get("weights") else []

    def facts(self) -> dict[str, Any]:
        """Return name and options as they are stored with trained models, whose weights come from no other file."""
        return {"name": self.name} | {name: value for name, value in self.options.items() if name != "weights"}

    def _built(self, shape: Shape, classes: int) -> tuple[SplitModel, list[str]]:
        """Build the network and return remarks about its weights."""
        options = check(self.name, self.options)
        common = {name: options.pop(name) for name in COMMON if name in options}
        model = self._network(shape, classes, options)
        frozen = [*common.get("freeze", ()), *untrained_parts(model)]
        disable_fast_attention(model)
        if lora := common.get("lora"):
            add_adapters(model, lora, common.get("freeze", ()), shape)  # freezes the extractor
            frozen = [name for name in frozen if name in common.get("freeze", ()) or not under(name, ["extractor"])]
        notes = []
        on_meta = any(tensor.is_meta for tensor in model.parameters())  # only the size of the network is wanted
        if (file := common.get("weights")) and not on_meta:
            notes.append(load_weights(model, file))
        if width := common.get("project"):
            project(model, width, classes)
        freeze(model, frozen)
        return model, notes

    def _network(self, shape: Shape, classes: int, options: dict[str, Any]) -> SplitModel:
        network = MODELS.find(self.name)
        images = getattr(network, "images", False)
        if min(shape, default=0) < 1 or (images and len(shape) != 3):
            what = "images (channels, height, width)" if images else "inputs"
            remedy = "; choose mlp, which takes inputs of any shape" if images else ""
            if images and len(shape) == 2:
                remedy += ", or give grey images as x[:, None]"
            raise UserError(f"model '{self.name}': needs {what}, but the shape of a sample is {tuple(shape)}{remedy}")
        if images and shape[2] in (1, 3, 4) and shape[0] not in (1, 3, 4) and shape[1] > 4:
            raise UserError(
                f"model '{self.name}': the shape of a sample is {tuple(shape)}, with channels last; give "
                "channels first: x.transpose(0, 3, 1, 2)"
            )
        least = getattr(network, "smallest", 1)
        if images and min(shape[1:]) < least:
            raise UserError(
                f"model '{self.name}': needs images of at least {least}×{least} pixels, but the shape is {shape}"
            )
        if classes < 1:
            raise UserError(f"model '{self.name}': classes = {classes}: must be at least 1")
        if is_split(network):
            return cast(SplitModel, network(shape, classes, **options))
        head = options.pop("head", None)
        return build_plain(network, self.name, shape, classes, options, head)


def _unpickled(name: str, options: Mapping[str, Any], allowed: Mapping[str, str], own: Network | None) -> Factory:
    trusted_code.allow_hashes(allowed)
    if own is not None:
        MODELS[name] = own
    return Factory(name, options)


def build(name: str, *, shape: Shape, classes: int, **options: Any) -> SplitModel:
    """Build a network from its name.

    Args:
        name: A registered network or `path/to/file.py:Name`. The file is imported, which runs its code.
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
        name: A registered network or `path/to/file.py:Name`.
        options: Its options.

    Returns:
        The options, converted to their annotated types.

    Raises:
        UserError: The name or an option is unknown, or a value is invalid.
    """
    return validated(_declared(MODELS.find(name)), options, "model", name)


def _declared(network: Network) -> Declaration:
    own = declared(network) if is_split(network) else options_of(network) | {"head": (str, None)}
    return own | COMMON
