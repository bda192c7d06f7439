"""What a method is: which parts a client holds, what it shares and keeps, how it learns. Never where it runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from inspect import get_annotations
from types import new_class
from typing import Any, ClassVar, cast, dataclass_transform, get_type_hints

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.registry import Registry, subclass_of
from fedloom.core.server import Server
from fedloom.core.state import Part, under
from fedloom.core.task import Task


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method. Subclass it (or another method), and it is known by its class name in lower case.

    Annotated attributes are hyperparameters; there is no other state. Everything that a client or the server remembers
    is a part that `build` returns.
    """

    shares: ClassVar[tuple[str, ...]] = ("model",)
    """Parts that travel both ways and are averaged."""
    sends: ClassVar[tuple[str, ...]] = ()
    """Parts that go up only."""
    receives: ClassVar[tuple[str, ...]] = ()
    """Parts that come down only."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Parts that are the client's own between rounds."""
    serves: ClassVar[tuple[str, ...] | None] = None
    """Kept parts that the personal model reads; all of them unless said otherwise."""
    by: ClassVar[Mapping[str, str]] = {}
    """Averaging weights other than the sample count: {"means": "counts"}."""
    sums: ClassVar[tuple[str, ...]] = ()
    """What is added up instead of averaged."""
    has_global: ClassVar[bool] = True
    """Whether there is one model for everybody, to be evaluated beside the personal ones."""
    pooled: ClassVar[bool] = False
    """Whether all data are trained on in one place (no federation at all)."""
    objective: ClassVar[str] = "labels"
    """What it is trained on unless the recipe says otherwise."""
    learns_from: ClassVar[tuple[str, ...]] = ("labels", "views")
    """What it can be trained on."""
    reveals: ClassVar[Mapping[str, str]] = {}
    """What parts that a client sends say about its data besides what any weights do: {"counts": "..."}."""
    paper: ClassVar[str] = ""
    """Where it comes from."""

    def __init_subclass__(cls, abstract: bool = False, addon: str | None = None, **options: Any) -> None:
        """Registers the class: as a method, or as what `+addon` adds to one; an `abstract` one is only a base."""
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__setattr__ = _refuse  # type: ignore[method-assign, assignment]
        cls.name, cls.plain = cls.__name__.lower(), cls
        if addon is not None:
            ADDONS.add(addon, cls)
        elif not abstract:
            METHODS.add(cls.name, cls)

    name: ClassVar[str] = "method"

    plain: ClassVar[type["Method"]]
    """The method without what `+…` added to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """By the plain class, additions and hyperparameters: a method with additions is made at run time."""
        added = self.name.removeprefix(self.plain.name).split("+")[1:]
        addons = [(name, ADDONS.find(name)) for name in added]
        return _again, (self.plain, addons, {f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def up(self) -> tuple[str, ...]:
        """Parts that a client sends."""
        return (*self.shares, *self.sends)

    @property
    def down(self) -> tuple[str, ...]:
        """Parts that a client receives."""
        return (*self.shares, *self.receives)

    def build(self, task: Task) -> dict[str, Part]:
        """All state that a step may read, as named modules and tensors."""
        return {"model": task.model()}

    def prepare(self, client: Client) -> None:
        """Once per client, before its first update."""

    def update(self, client: Client) -> None:
        """A client's work in a round."""
        client.fit("model", self.loss)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """What `update` minimises."""
        loss: Tensor = client.objective(client.model, batch)
        return loss

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """What the server makes of a round's messages: a one-pass iterator, so that memory stays constant."""
        server.move(server.average(messages, by=self.by, sums=self.sums))

    def message_for(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """What the server sends to a client."""
        return {name: value for name, value in server.state.items() if under(name, self.down)}

    def personalise(self, client: Client) -> None:
        """Makes the personal model out of what was learnt; before personal evaluation, for every client."""

    @property
    def served_by(self) -> str:
        """The part that is the network of `network`."""
        return "model"

    def network(self, client: Client) -> Any:
        """The network that serves a client; a method that has a personal one beside the shared one says which."""
        return getattr(client, self.served_by)

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """A client's representation of inputs, as heads that are put on it later see it."""
        z: Tensor = self.network(client).extractor(x)
        return z

    def generalise(self, client: Client) -> None:
        """Completes the global representation for evaluation, on a whole style's data (methods that need it)."""

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Logits of a client's personal model."""
        logits: Tensor = self.network(client)(x)
        return logits

    def predict_global(self, server: Any, x: Tensor) -> Tensor:
        """Logits of the model for everybody."""
        logits: Tensor = server.model(x)
        return logits

    @classmethod
    def overrides(cls, name: str) -> bool:
        """Whether this method has its own version of a base method."""
        return getattr(cls, name) is not getattr(Method, name)

    @property
    def personal_is_global(self) -> bool:
        """Whether every client is served by the one shared model as it is."""
        own = ("personalise", "network", "predict", "message_for", "predict_global")
        return self.has_global and not self.personal_parts and not any(self.overrides(name) for name in own)

    @property
    def personal_parts(self) -> tuple[str, ...]:
        """Kept parts without which a client's model is not its own."""
        return self.keeps if self.serves is None else self.serves


def _again(plain: type[Method], addons: list[tuple[str, type[Method]]], parameters: dict[str, Any]) -> Method:
    """The method that was pickled."""
    return reduce(lambda base, addon: with_addon(base, *addon), addons, plain)(**parameters)


def with_addon(base: type[Method], name: str, addition: type[Method]) -> type[Method]:
    """The method with an addition's behaviour.

    Where both have a hyperparameter, the addition's default counts only if the addition itself sets it.
    """
    own, hints = get_annotations(addition), get_type_hints(base, include_extras=True)
    kept = {f.name: f for f in fields(base) if f.name not in own}
    body = {"__annotations__": {field: hints[field] for field in kept}} | {
        field: f.default for field, f in kept.items()
    }
    docs = f"{(base.__doc__ or '').splitlines()[0]} {(addition.__doc__ or '').splitlines()[0]}"
    title = f"{base.name}+{name}"
    found: Any = new_class(
        title, (addition, base), {"abstract": True}, lambda space: space.update(body, __doc__=docs, __module__=__name__)
    )
    found.name, found.plain = title, base.plain
    return cast(type[Method], found)


def _refuse(method: Method, attribute: str, value: object) -> None:
    raise AttributeError(f"a method is frozen: '{attribute}' changes, so it belongs into a part (see build)")


METHODS: Registry[type[Method]] = Registry(
    "method.name",
    "a subclass of fedloom.Method",
    subclass_of(Method),
    package="fedloom.methods",
    group="fedloom.methods",
)
ADDONS: Registry[type[Method]] = Registry(
    "method.name", "a subclass of fedloom.Method", subclass_of(Method), package="fedloom.methods.addons",
    group="fedloom.addons",
)  # fmt: skip
"""What `+…` adds to a method."""
