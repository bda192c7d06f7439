"""The base class of all methods, and the registries of methods and add-ons."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from inspect import get_annotations
from types import new_class
from typing import Any, ClassVar, cast, dataclass_transform, get_type_hints

from torch import Tensor, nn

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
    """A personalised federated learning method.

    A subclass is registered under its class name in lower case. Its annotated attributes are hyperparameters, which a
    recipe can set. A method has no other attributes and is frozen: everything that clients or the server remember is a
    part that `build` returns. Method code does not depend on the engine that runs it.

    The class attributes say how parts travel. A part is named by its dotted path, such as `"model"` or `"model.head"`.

    Args:
        abstract: Class keyword. The class is only a base class and is not registered.
        addon: Class keyword. Register the class as the add-on `+addon` instead of as a method.

    Example:
        >>> class FedProx(Method):
        ...     mu: float = 0.01
        ...
        ...     def loss(self, client, batch):
        ...         distance = squared_distance(client.model, client.received.model)
        ...         return super().loss(client, batch) + self.mu / 2 * distance
    """

    shares: ClassVar[tuple[str, ...]] = ("model",)
    """Parts that are sent in both directions and averaged."""
    sends: ClassVar[tuple[str, ...]] = ()
    """Parts that only clients send."""
    receives: ClassVar[tuple[str, ...]] = ()
    """Parts that only the server sends."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Parts that each client keeps between rounds."""
    keeps_layers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Types of layers that each client keeps wherever they are, also inside shared parts; they are never sent."""
    server_keeps: ClassVar[tuple[str, ...]] = ()
    """Parts that only the server holds, such as its momentum; they are never sent."""
    serves: ClassVar[tuple[str, ...] | None] = None
    """Kept parts that the personal model uses; None means all of them."""
    by: ClassVar[Mapping[str, str]] = {}
    """Averaging weights that replace the sample count, by part: `{"means": "counts"}`."""
    sums: ClassVar[tuple[str, ...]] = ()
    """Parts that are summed instead of averaged."""
    has_global: ClassVar[bool] = True
    """Whether there is a global model, which is evaluated in addition to the personal ones."""
    pooled: ClassVar[bool] = False
    """Whether one model is trained centrally on the data of all clients."""
    objective: ClassVar[str] = "labels"
    """Objective used when the recipe names none."""
    learns_from: ClassVar[tuple[str, ...]] = ("labels", "multilabel", "views")
    """Supported kinds of objectives: with one class per sample, with several labels, or on augmented views."""
    reveals: ClassVar[Mapping[str, str]] = {}
    """What sent parts reveal about a client's data beyond ordinary weights: `{"counts": "samples per class"}`."""
    paper: ClassVar[str] = ""
    """Reference of the paper."""

    def __init_subclass__(cls, abstract: bool = False, addon: str | None = None, **options: Any) -> None:
        """Register the class as a method, or as an add-on; an `abstract` class is not registered."""
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__setattr__ = _refuse  # type: ignore[method-assign, assignment]
        cls.name, cls.plain = cls.__name__.lower(), cls
        if addon is not None:
            ADDONS.add(addon, cls)
        elif not abstract:
            METHODS.add(cls.name, cls)

    name: ClassVar[str] = "method"
    """Name in recipes: the class name in lower case, followed by `+…` for each add-on."""

    plain: ClassVar[type["Method"]]
    """The class without add-ons."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain class, add-ons and hyperparameters: a class with add-ons has no importable name."""
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
        """Create all parts: the state that clients and the server hold and that training steps may read.

        Random initial values are drawn with a fixed seed, so that all clients start from the same values. The default
        is one network, `model`.

        Args:
            task: The data, the network factory and the objective.

        Returns:
            Modules and tensors by name.

        Example:
            >>> def build(self, task):
            ...     return {"model": task.model(), "counts": torch.zeros(task.classes)}
        """
        return {"model": task.model()}

    def prepare(self, client: Client) -> None:
        """Initialise a client's parts once, before its first update. The default does nothing.

        Args:
            client: The client, with the received parts already loaded.
        """

    def update(self, client: Client) -> None:
        """Do a client's work of one round. The default trains `model` on `loss`.

        Afterwards the shared and sent parts are sent to the server, and the kept parts are stored.

        Args:
            client: The client, with initial values, received parts and its memory loaded in this order.

        Example:
            >>> def update(self, client):
            ...     client.fit("model.head", self.loss, epochs=self.head_epochs)
            ...     client.fit("model.extractor", self.loss)
        """
        client.fit("model", self.loss)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss that `update` minimises. The default is the recipe's objective.

        Args:
            client: The client that trains.
            batch: The samples of one step.

        Returns:
            A scalar, or one entry per sample.
        """
        loss: Tensor = client.objective(client.model, batch)
        return loss

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Update the server's state from the messages of one round. The default averages them.

        Args:
            server: The server; `server.state` holds the shared parts.
            messages: The messages of the clients that responded. They can be iterated once only, so that memory use
                does not depend on the number of clients.

        Example:
            >>> def combine(self, server, messages):
            ...     server.move(server.average(messages), by=self.server_lr)
        """
        server.move(server.average(messages, by=self.by, sums=self.sums))

    def message_for(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """Return the tensors that the server sends to a client. The default is the state of all parts in `down`.

        Args:
            server: The server.
            client: The client's number.
        """
        return {name: value for name, value in server.state.items() if under(name, self.down)}

    def personalise(self, client: Client) -> None:
        """Create the personal model before evaluation, for instance by fine-tuning. The default does nothing.

        Changes are used for this evaluation only and are not stored.

        Args:
            client: The client, with received parts and its memory loaded.
        """

    @property
    def served_by(self) -> str:
        """Name of the part that is the client's personal network."""
        return "model"

    def network(self, client: Client) -> Any:
        """Return the network that makes a client's predictions. The default is the part named by `served_by`.

        Override it in methods that have a personal network alongside the shared one.
        """
        return getattr(client, self.served_by)

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return a client's representations of inputs, as used by heads that are added later.

        Args:
            client: The client.
            x: Normalised images [B, C, H, W].

        Returns:
            Representations [B, k].
        """
        z: Tensor = self.network(client).extractor(x)
        return z

    def generalise(self, client: Client) -> None:
        """Complete the global representation before its evaluation on one style. The default does nothing.

        Args:
            client: A client that holds the samples of all clients of the style.
        """

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of a client's personal model.

        Args:
            client: The client, after `personalise`.
            x: Normalised images [B, C, H, W].

        Returns:
            Logits [B, outputs], as the objective's heads return them, or [B, classes].
        """
        logits: Tensor = self.network(client)(x)
        return logits

    def predict_global(self, server: Any, x: Tensor) -> Tensor:
        """Return the logits of the global model.

        Args:
            server: An object with the server's parts as attributes, such as `server.model`.
            x: Normalised images [B, C, H, W].

        Returns:
            Logits [B, outputs], as the objective's heads return them, or [B, classes].
        """
        logits: Tensor = server.model(x)
        return logits

    @classmethod
    def overrides(cls, name: str) -> bool:
        """Return whether this class overrides a function of `Method`."""
        return getattr(cls, name) is not getattr(Method, name)

    @property
    def personal_is_global(self) -> bool:
        """Whether every client uses the global model unchanged."""
        own = ("personalise", "network", "predict", "message_for", "predict_global")
        return self.has_global and not self.is_personal and not any(self.overrides(name) for name in own)

    @property
    def personal_parts(self) -> tuple[str, ...]:
        """Kept parts that the personal model uses."""
        return self.keeps if self.serves is None else self.serves

    @property
    def is_personal(self) -> bool:
        """Whether the personal model uses anything that a client keeps."""
        return bool(self.personal_parts or self.keeps_layers)


def _again(plain: type[Method], addons: list[tuple[str, type[Method]]], parameters: dict[str, Any]) -> Method:
    """Rebuild a pickled method."""
    return reduce(lambda base, addon: with_addon(base, *addon), addons, plain)(**parameters)


def with_addon(base: type[Method], name: str, addition: type[Method]) -> type[Method]:
    """Return a subclass of `base` with the behaviour of an add-on.

    If both have the same hyperparameter, the add-on's default is used only if the add-on class itself declares it.
    """
    own, hints = get_annotations(addition), get_type_hints(base, include_extras=True)
    kept = {f.name: f for f in fields(base) if f.name not in own}
    body: dict[str, Any] = {"__annotations__": {field: hints[field] for field in kept}}
    body |= {field: f.default for field, f in kept.items()}
    body["learns_from"] = tuple(kind for kind in base.learns_from if kind in addition.learns_from)
    docs = f"{(base.__doc__ or '').splitlines()[0]} {(addition.__doc__ or '').splitlines()[0]}"
    title = f"{base.name}+{name}"
    found: Any = new_class(
        title, (addition, base), {"abstract": True}, lambda space: space.update(body, __doc__=docs, __module__=__name__)
    )
    found.name, found.plain = title, base.plain
    return cast(type[Method], found)


def _refuse(method: Method, attribute: str, value: object) -> None:
    raise AttributeError(
        f"method.{attribute} = …: methods are frozen; store values that change in a part (see Method.build)"
    )


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
"""Add-ons, which `+name` adds to a method."""
