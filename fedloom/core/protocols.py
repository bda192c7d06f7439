"""Protocols that core requires of the layers above. The members are documented where they are implemented."""
# ruff: noqa: D102

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeGuard

from torch import Tensor, nn

from fedloom.core.state import Part

Shape = tuple[int, ...]
"""Shape of a sample: channels, height and width of an image; any other shape of other inputs."""


class Network(Protocol):
    """A module with two parts: an extractor (input → representation) and a head (representation → logits)."""

    extractor: nn.Module
    head: nn.Module
    features: int


def is_network(module: nn.Module) -> TypeGuard[Network]:
    """Return whether a module is a `Network`. `isinstance` does not find submodules since Python 3.12."""
    return all(hasattr(module, name) for name in ("extractor", "head", "features"))


class ModelFactory(Protocol):
    """Creates freshly initialised networks; see `fedloom.models.Factory`."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    def __call__(self, shape: Shape, classes: int) -> Any: ...
    def notes(self, shape: Shape, classes: int) -> list[str]: ...
    def facts(self) -> dict[str, Any]: ...


class Objective(Protocol):
    """A training objective; see `fedloom.objectives.Objective`."""

    name: ClassVar[str]
    supervised: ClassVar[bool]

    def __call__(self, model: Any, batch: Any) -> Tensor: ...
    def equip(self, model: Any) -> Any: ...
    def begin(self, model: Any) -> None: ...
    def follow(self, model: Any) -> None: ...


class MethodLike(Protocol):
    """The interface of a method that engines and the server use; see `fedloom.Method`."""

    name: ClassVar[str]
    by: ClassVar[Mapping[str, str]]
    sums: ClassVar[tuple[str, ...]]
    reveals: ClassVar[Mapping[str, str]]
    pooled: ClassVar[bool]
    plain: ClassVar[Any]

    @property
    def keeps(self) -> tuple[str, ...]: ...
    @property
    def up(self) -> tuple[str, ...]: ...
    @property
    def down(self) -> tuple[str, ...]: ...
    @property
    def personal_parts(self) -> tuple[str, ...]: ...
    def build(self, task: Any) -> dict[str, Part]: ...
    def prepare(self, client: Any) -> None: ...
    def update(self, client: Any) -> None: ...
    def personalise(self, client: Any) -> None: ...
    def generalise(self, client: Any) -> None: ...
    def predict(self, client: Any, x: Tensor) -> Tensor: ...
    def predict_global(self, server: Any, x: Tensor) -> Tensor: ...
