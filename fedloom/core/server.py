"""The server: the shared state, its memory of each client, and the averaging of messages."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.fit import FitResult
from fedloom.core.flat_state import FlatState, Layout
from fedloom.core.message import Message
from fedloom.core.state import Parts, State, as_paths, snapshot, under
from fedloom.core.workspace import Workspace

By = Mapping[str, str]
_PLACES = ("state/", "kept/")
SMALLEST = torch.finfo(torch.float64).tiny


class Combination(Protocol):
    """Replacement for the weighted mean in `Server.average`: a robust aggregation rule, or differential privacy."""

    refusal: str
    """Error message for methods that read messages directly instead of calling `server.average`."""

    def average(
        self,
        server: "Server",
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: By,
        sums: tuple[str, ...],
    ) -> State:
        """Return the result of `server.average`."""


class Server:
    """The server, as passed to a method's `combine` and `message_for`.

    All changes must be made in `state` and `clients`, which are part of checkpoints. A resumed run does not restore
    names that a method adds to `state`: state that only the server needs is a part in `server_keeps`.

    Example:
        >>> def combine(self, server, messages):
        ...     server.move(server.average(messages, "model"))
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        federation: int,
        clients: MutableMapping[int, State] | None = None,
        combination: Combination | None = None,
    ):
        self._workspace = workspace
        self._state = workspace.downward()
        self._clients: MutableMapping[int, State] = {} if clients is None else clients
        self._federation = federation
        self._combination = combination
        self._trainer = self._client(0, {})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"server.{name}: there is no such attribute; shared tensors are in server.state, modules in server.parts"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"server.{name} = … would be lost when the run is resumed; use parts in server.state, or server.clients"
            )
        super().__setattr__(name, value)

    def _client(self, round: int, optimizers: State) -> Client:
        """Return the client without samples that `fit` trains with, in the server's workspace."""
        nothing = np.empty(0, np.int64)
        return Client(self._workspace, id=-1, round=round, job="server", samples=nothing, optimizers=optimizers)

    @property
    def state(self) -> State:
        """The shared parts and those in `server_keeps`: a dictionary of tensors, stored in checkpoints."""
        return self._state

    @property
    def clients(self) -> MutableMapping[int, State]:
        """The server's memory of each client: a dictionary of tensors per client number."""
        return self._clients

    @property
    def federation(self) -> int:
        """Number of clients that can take part."""
        return self._federation

    @property
    def round(self) -> int:
        """The communication round, counted from 1."""
        return self._trainer.round

    @property
    def parts(self) -> Parts:
        """The modules that `build` returned, for their structure. The current values are in `state`."""
        return self._workspace.parts

    def begin(self, round: int) -> None:
        """Start a round: the random numbers of `fit` depend on it."""
        self._trainer = self._client(round, self._trainer.optimizers)

    def saved(self) -> State:
        """Return everything to checkpoint besides `clients`: the state, and kept optimizer state of `fit`."""
        return {f"state/{name}": t for name, t in self._state.items()} | {
            f"kept/{name}": t for name, t in self._trainer.optimizers.items()
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the values returned by `saved`.

        Raises:
            UserError: The checkpoint's tensors do not match the method's.
        """
        split = {place: {n[len(place) :]: t for n, t in saved.items() if n.startswith(place)} for place in _PLACES}
        for name, now in self._state.items():
            was = split["state/"].get(name)
            if was is None or (was.shape, was.dtype) != (now.shape, now.dtype):
                found = (
                    "is not in the checkpoint"
                    if was is None
                    else f"has {tuple(was.shape)}, {was.dtype} in the checkpoint"
                )
                raise UserError(
                    f"{name} has shape {tuple(now.shape)}, {now.dtype}, but {found}: the method has changed; start a "
                    "new run"
                )
        self._state = {name: split["state/"][name] for name in self._state}  # keeps the order of names
        self._trainer = self._client(self.round, split["kept/"])

    def average(
        self,
        messages: Iterable[Message],
        parts: str | tuple[str, ...] | None = None,
        *,
        by: By | Literal["uniform"] | None = None,
        sums: tuple[str, ...] = (),
    ) -> State:
        """Return the weighted mean of messages, in one pass and constant memory.

        Sums are computed in float64, so that the mean of equal values is that value. For integer tensors the maximum is
        returned. Parts without any weight keep the server's old value. A recipe's `robust` or `privacy` section
        replaces the mean.

        Args:
            messages: The messages of a round.
            parts: Parts to average. Default: all.
            by: Weights that replace the clients' sample counts. `{"means": "counts"}` uses the tensor `counts` of the
                same message as row-wise weights of the part `means`, or as one weight if `counts` is a single number;
                `"uniform"` weights all clients equally.
            sums: Parts that are summed instead.

        Returns:
            The means by name. The server's state is not changed; pass them to `move`.

        Example:
            >>> server.average(messages, "model.extractor", by="uniform")
        """
        paths = None if parts is None else as_paths(parts)
        rows = self._rows(by) if isinstance(by, Mapping) else {}
        if self._combination is not None:
            return self._combination.average(self, messages, paths, rows, sums)
        mean = WeightedMean(self._state, paths, rows, sums)
        for message in messages:
            mean.add(message, 1.0 if by == "uniform" else float(message.samples))
        return mean.result()

    def _rows(self, by: By) -> By:
        """Return the weights of each floating-point tensor of the parts in `by`."""
        names = [name for name, value in self._state.items() if value.is_floating_point()]
        return {**by, **{name: weights for part, weights in by.items() for name in names if under(name, (part,))}}

    def move(self, new: Mapping[str, Tensor], by: float | Mapping[str, float] = 1.0) -> None:
        """Update the state in place: state ← state + by · (new − state).

        Args:
            new: New values by name, usually from `average`. Integer tensors are replaced.
            by: Step size, or step sizes by part (`{"model.head": 0.5}`, 1 for all other parts).

        Example:
            >>> server.move(server.average(messages), by=0.5)
        """
        for name, value in new.items():
            if isinstance(by, Mapping):
                step = next((weight for prefix, weight in by.items() if under(name, (prefix,))), 1.0)
            else:
                step = by
            whole = step == 1.0 or not value.is_floating_point()
            self._state[name] = value if whole else torch.lerp(self._state[name], value, step)

    def fit(self, parts: str | tuple[str, ...], loss: Any, **options: Any) -> FitResult:
        """Train parts at the server, starting from `state`, and store the result in `state`.

        Args:
            parts: The parts to train.
            loss: Called as `loss(client, batch)`, as in `Client.fit`.
            **options: Options of `Client.fit`. `data=(z, y)` is required, since a server has no images.

        Returns:
            The means of the loss and of everything passed to `client.note`.
        """
        self._workspace.load(self._state, None)
        result = self._trainer.fit(parts, loss, **options)
        self._state |= snapshot(self._workspace.parts, as_paths(parts))
        return result


def weighted_sum(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
    """Return Σ_i weights_i · states_i by name, computed in float64 and returned in the states' types."""
    mixed: State = {}
    for name, first in states[0].items():
        values = torch.stack([state[name].double() for state in states])
        mixed[name] = torch.tensordot(values.new_tensor(weights), values, 1).to(first.dtype)
    return mixed


class WeightedMean:
    """Running weighted mean of messages. `Server.average` explains the arguments.

    A flat message is added in one operation per dtype if all its parts are treated equally.
    """

    def __init__(self, old: State, paths: tuple[str, ...] | None, rows: By, sums: tuple[str, ...]):
        self._old, self._paths, self._rows, self._sums = old, paths, rows, sums
        self._totals: State = {}
        self._weights: dict[str, Tensor | float] = {}
        self._flat: dict[Layout, tuple[dict[torch.dtype, Tensor], list[float]]] = {}

    def add(self, message: Message, weight: float) -> None:
        """Add a message with this weight."""
        if isinstance(message.tensors, FlatState) and self._paths is None and not self._rows and not self._sums:
            self._add_flat(message.tensors, weight)
            return
        for name, value in message.items():
            if self._paths is None or under(name, self._paths):
                self._add(name, value, weight, message)

    def _add_flat(self, state: FlatState, weight: float) -> None:
        totals, weights = self._flat.setdefault(state.layout, ({}, []))
        weights.append(weight)
        for dtype, buffer in state.buffers.items():
            if not dtype.is_floating_point:
                totals[dtype] = torch.maximum(totals.get(dtype, buffer), buffer)
                continue
            if dtype not in totals:
                totals[dtype] = torch.zeros_like(buffer, dtype=torch.float64)
            totals[dtype].add_(buffer, alpha=weight)

    def _add(self, name: str, value: Tensor, weight: float | Tensor, message: Message) -> None:
        totals, weights = self._totals, self._weights
        if under(name, self._sums):
            totals[name] = totals[name] + value if name in totals else value
            return
        if not value.is_floating_point():
            totals[name] = torch.maximum(totals.get(name, value), value)
            return
        if name in self._rows:
            weight = message[self._rows[name]].double()
            weight = weight.reshape(*weight.shape, *[1] * (value.dim() - weight.dim()))
            share = value.double() * weight
            totals[name] = totals[name].add_(share) if name in totals else share
        else:
            if name not in totals:
                totals[name] = torch.zeros_like(value, dtype=torch.float64)
            totals[name].add_(value, alpha=float(weight))
        weights[name] = weights.get(name, 0.0) + weight

    def of(self, weighted: Iterable[tuple[Message, float]]) -> State:
        """Return the mean of messages with these weights."""
        for message, weight in weighted:
            self.add(message, weight)
        return self.result()

    def result(self) -> State:
        """Return the mean, and the old value of parts without any weight."""
        if len(self._flat) == 1 and not self._totals:
            return self._flat_mean(*next(iter(self._flat.items())))
        for layout, (totals, each) in self._flat.items():  # messages of several layouts are combined by name
            for name, total in FlatState(layout, totals).items():
                if total.is_floating_point():
                    self._totals[name] = self._totals[name] + total if name in self._totals else total
                    self._weights[name] = self._weights.get(name, 0.0) + sum(each)
                else:
                    self._totals[name] = torch.maximum(self._totals.get(name, total), total)
        return {name: self._settled(name, total, self._weights.get(name)) for name, total in self._totals.items()}

    def _flat_mean(self, layout: Layout, summed: tuple[dict[torch.dtype, Tensor], list[float]]) -> State:
        totals, weights = summed
        weight = sum(weights)
        means = {
            dtype: (total / max(weight, SMALLEST)).to(dtype) if dtype.is_floating_point else total
            for dtype, total in totals.items()
        }
        found: State = {}
        for name, mean in FlatState(layout, means).items():
            old = self._old.get(name)
            if mean.is_floating_point():
                found[name] = old if weight == 0 and old is not None else mean
            else:
                found[name] = mean if old is None else torch.where(mean != 0, mean, old)
        return found

    def _settled(self, name: str, total: Tensor, weight: Tensor | float | None) -> Tensor:
        old = self._old.get(name)
        if weight is None:  # a sum or a maximum
            return total if old is None else torch.where(total != 0, total, old)
        if isinstance(weight, float):
            if weight == 0 and old is not None:
                return old
            return (total / max(weight, SMALLEST)).to(torch.float32 if old is None else old.dtype)
        mean = (total / weight.clamp_min(SMALLEST)).float()
        return mean if old is None else torch.where((weight > 0).expand_as(total), mean.to(old.dtype), old)
