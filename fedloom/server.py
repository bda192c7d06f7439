"""The server: the shared state, what it remembers of each client, and the one place where averaging happens."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.lane import Lane
from fedloom.message import Message
from fedloom.parts import State, as_paths, snapshot, under
from fedloom.worker import Told, Worker

By = Mapping[str, str]
_PLACES = ("state/", "kept/")
SMALLEST = torch.finfo(torch.float64).tiny


class Combination(Protocol):
    """What stands in for the weighted mean: a robust rule, or differential privacy."""

    refusal: str
    """What a method is told that reads messages itself."""

    def average(
        self,
        server: "Server",
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: By,
        sums: tuple[str, ...],
    ) -> State:
        """What `server.average` returns."""


class Server(Worker):
    """Holds `state` (what goes down to clients) between rounds; `clients` is its memory of each of them."""

    def __init__(
        self,
        lane: Lane,
        *,
        federation: int,
        clients: MutableMapping[int, State] | None = None,
        combination: Combination | None = None,
    ):
        super().__init__(lane, who=-1, round=0, job="server", samples=np.empty(0, np.int64))
        self._state = lane.downward()
        self._clients: MutableMapping[int, State] = {} if clients is None else clients
        self._federation = federation
        self._combination = combination

    @property
    def state(self) -> State:
        """The shared parts, by name."""
        return self._state

    @property
    def clients(self) -> MutableMapping[int, State]:
        """What the server remembers of each client."""
        return self._clients

    @property
    def federation(self) -> int:
        """How many clients could take part."""
        return self._federation

    def begin(self, round: int) -> None:
        """Starts a round: randomness is keyed by it."""
        self._round = round
        self._uses = {}

    def saved(self) -> State:
        """All that it holds from round to round, besides `clients`: state, and optimizers that `fit` keeps."""
        return {f"state/{name}": t for name, t in self._state.items()} | {
            f"kept/{name}": t for name, t in self._kept.items()
        }

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Goes on from what `saved` gave."""
        split = {place: {n[len(place) :]: t for n, t in saved.items() if n.startswith(place)} for place in _PLACES}
        for name, now in self._state.items():
            was = split["state/"].get(name)
            if was is None or was.shape != now.shape:
                found = "is not in the checkpoint" if was is None else f"has {tuple(was.shape)} in the checkpoint"
                raise UserError(
                    f"{name}, of shape {tuple(now.shape)}, {found}: the method has changed since; begin a new run"
                )
        self._state = {name: split["state/"][name] for name in self._state}  # in the order that it had
        self._kept = split["kept/"]

    def average(
        self,
        messages: Iterable[Message],
        parts: str | tuple[str, ...] | None = None,
        *,
        by: By | Literal["uniform"] | None = None,
        sums: tuple[str, ...] = (),
    ) -> State:
        """The weighted mean of what was sent, in one pass and constant memory.

        Weights are the clients' sample counts; `by={"means": "counts"}` takes the tensor `counts` of the same message
        as the (row-wise) weights of `means`; `by="uniform"` weighs all alike. Names in `sums` are added up. Integer
        tensors take the maximum. Where nothing was sent the server's old value stays. Sums run in float64, so that the
        mean of equal values is that value. A recipe's `robust` or `privacy` section takes the mean's place.
        """
        paths = None if parts is None else as_paths(parts)
        rows: By = by if isinstance(by, Mapping) else {}
        if self._combination is not None:
            return self._combination.average(self, messages, paths, rows, sums)
        alike = by == "uniform"
        return self.mean(((m, 1.0 if alike else float(m.samples)) for m in messages), paths, rows, sums)

    def mean(
        self,
        weighted: Iterable[tuple[Message, float]],
        paths: tuple[str, ...] | None,
        rows: By,
        sums: tuple[str, ...],
    ) -> State:
        """`average` of messages with these weights, whatever the recipe says of robustness or privacy."""
        totals: State = {}
        weights: dict[str, Tensor | float] = {}
        for message, own in weighted:
            plain: State = {}
            for name, value in message.items():
                if paths is not None and not under(name, paths):
                    continue
                if under(name, sums):
                    totals[name] = totals[name] + value if name in totals else value
                elif not value.is_floating_point():
                    totals[name] = torch.maximum(totals.get(name, value), value)
                elif name in rows:
                    weight = message[rows[name]].double().reshape(-1, *[1] * (value.dim() - 1))
                    share = value.double() * weight
                    totals[name] = totals[name].add_(share) if name in totals else share
                    weights[name] = weights.get(name, 0.0) + weight
                else:
                    plain[name] = value
            _add(plain, own, totals, weights)
        return {name: self._settled(name, total, weights.get(name)) for name, total in totals.items()}

    def _settled(self, name: str, total: Tensor, weight: Tensor | float | None) -> Tensor:
        """A mean out of a weighted sum; the old value where nothing was sent."""
        old = self._state.get(name)
        if weight is None:  # a sum or a maximum
            return total if old is None else torch.where(total != 0, total, old)
        if isinstance(weight, float):
            if weight == 0 and old is not None:
                return old
            return (total / max(weight, SMALLEST)).to(torch.float32 if old is None else old.dtype)
        mean = (total / weight.clamp_min(SMALLEST)).float()
        return mean if old is None else torch.where((weight > 0).expand_as(total), mean.to(old.dtype), old)

    def move(self, new: Mapping[str, Tensor], by: float | Mapping[str, float] = 1.0) -> None:
        """state ← state + by · (new − state); `by` may differ per part ({prefix: number}, 1 elsewhere)."""
        for name, value in new.items():
            if isinstance(by, Mapping):
                step = next((weight for prefix, weight in by.items() if under(name, (prefix,))), 1.0)
            else:
                step = by
            whole = step == 1.0 or not value.is_floating_point()
            self._state[name] = value if whole else torch.lerp(self._state[name], value, step)

    def fit(self, parts: str | tuple[str, ...], loss: Any, **options: Any) -> Told:
        """Trains parts at the server (on `data=`), from its state, and puts them back into it."""
        self._lane.load(self._state, None)
        told = super().fit(parts, loss, **options)
        self._state |= snapshot(self._lane.parts, as_paths(parts))
        return told


def _add(values: State, weight: float, totals: State, weights: dict[str, Tensor | float]) -> None:
    """totals ← totals + weight · values, in float64 and one operation."""
    for name, value in values.items():
        if name not in totals:
            totals[name] = torch.zeros_like(value, dtype=torch.float64)
        weights[name] = weights.get(name, 0.0) + weight
    if values:
        torch._foreach_add_([totals[name] for name in values], list(values.values()), alpha=weight)
