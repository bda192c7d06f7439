"""Robust aggregation: rules that replace the weighted mean in `server.average` when some clients may be hostile.

All rules have in common:
- All clients have equal weight, because a sample count is only the client's claim.
- Row weights (`by={"means": "counts"}`) are 1 if a client holds a row and 0 if it does not. A row is combined over the
  clients that hold it, and the sum of its weights is their number.
- Other `sums` become the number of clients times the centre of the sent values.
- Integers take the maximum, as without a rule (Krum: of the chosen clients; median and trimmed mean: the median).
- A message with a number that is not finite is left out.

Before a rule, updates can be replaced by each client's momentum (`momentum.py`) and averaged in random buckets
(`buckets.py`).

`clip` and `centred` stream messages and need the memory of one message. All other rules hold all messages of a round at
once (clients × bytes up).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.checking import Section, refusal
from fedloom.core.errors import UserError
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server, WeightedMean
from fedloom.core.state import State, under
from fedloom.trust.access import readable, use_of_messages
from fedloom.trust.buckets import Orders, bucketed, system_orders
from fedloom.trust.centres import (
    clip_factor,
    geometric_weights,
    joint_norm,
    krum_needs,
    krum_scores,
    median,
    squared_distances,
    trimmed_mean,
)
from fedloom.trust.momentum import last_centre, store_centre, with_momentum

Rule = Literal["clip", "centred", "median", "trimmed", "krum", "multikrum", "geometric"]
NEEDS: dict[Rule, tuple[str, ...]] = {
    "clip": ("clip",), "centred": ("clip",), "median": (), "trimmed": ("trim",), "krum": ("attackers",),
    "multikrum": ("attackers",), "geometric": (),
}  # fmt: skip
"""All robust rules, with the fields of the recipe section `robust` that each requires."""


class RobustSettings(Section):
    """The recipe section `robust`: the rule that replaces the weighted mean."""

    rule: Rule = Field(
        description="clip (mean of clipped updates), centred (updates clipped around the last round's update), median "
        "or trimmed (per coordinate), krum (the message closest to its neighbours), multikrum (mean of the n − f "
        "closest), geometric (geometric median)"
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="rule clip: maximum L2 norm of a client's whole update; rule centred: maximum L2 distance of an "
        "update from the combined update of the last round",
    )
    trim: float | None = Field(
        None, gt=0, lt=0.5, description="rule trimmed: share of the values that is removed at each end"
    )
    attackers: int | None = Field(
        None, ge=0, description="rules krum and multikrum: maximum number f of hostile clients in a round"
    )
    momentum: float = Field(
        0,
        ge=0,
        lt=1,
        description="client momentum β: the rule combines (1 − β)·update + β·momentum of each client instead of its "
        "update, which averages out the noise behind which attackers hide; 0: no momentum",
    )
    bucket: int = Field(
        1,
        ge=1,
        description="bucket size: the rule combines the means of random buckets of this number of clients, for clients "
        "with different data; 1: no buckets",
    )

    @model_validator(mode="after")
    def _complete(self) -> "RobustSettings":
        for field in ("clip", "trim", "attackers"):
            value, needed = getattr(self, field), field in NEEDS[self.rule]
            if needed and value is None:
                example = {"clip": "1.0", "trim": "0.2", "attackers": "4"}[field]
                raise refusal(f"robust.{field} is missing: the rule {self.rule} needs it, for example {example}")
            if value is not None and not needed:
                users = ", ".join(rule for rule in NEEDS if field in NEEDS[rule])
                raise refusal(
                    f"robust.{field} = {value:g}: the rule {self.rule} does not use it (only: {users}); remove it"
                )
        return self


class RobustAverage:
    """A robust rule that replaces the weighted mean in `server.average`.

    Args:
        settings: The recipe section `robust`.
        method: The method whose messages are combined.
        expected: Planned number of clients per round.
        orders: Returns the source of a round's random buckets.

    Raises:
        UserError: The rule cannot protect the method, or needs more clients.
    """

    def __init__(self, settings: RobustSettings, method: Method, expected: int, orders: Orders = system_orders):
        self.settings, self._orders = settings, orders
        self.refusal = refusal_of(settings, method, READS)
        if reason := unprotected(method):
            raise UserError(refusal_of(settings, method, reason))
        self._check(expected, "take part in a round")

    def _check(self, clients: int, what: str) -> None:
        """Raise a UserError if the messages of this number of clients are too few for this rule."""
        n, things, more = -(-clients // self.settings.bucket), "clients", "use more clients"
        if self.settings.bucket > 1:
            what = f"are formed from the {clients} clients that {what} (robust.bucket = {self.settings.bucket})"
            things, more = "buckets", "use smaller buckets or more clients"
        rule, attackers, trim = self.settings.rule, self.settings.attackers, self.settings.trim
        if attackers is not None and n < krum_needs(attackers):
            most = (n - 3) // 2
            remedy = f"set it to at most {most}, or {more}" if most >= 0 else more
            raise UserError(
                f"robust.attackers = {attackers}: {rule} needs {krum_needs(attackers)} {things} (2f + 3), "
                f"but {n} {what}; {remedy} (training.fraction, data.clients)"
            )
        if trim is not None and _cut(trim, n) == 0:
            raise UserError(
                f"robust.trim = {trim:g}: removes no value when {n} {things} {what}; "
                + (f"set it to {1 / n:.3g} or more" if n > 2 else f"{more} (training.fraction, data.clients)")
            )

    def average(
        self,
        server: Server,
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: Mapping[str, str],
        sums: tuple[str, ...],
    ) -> State:
        """Combine messages by this rule.

        Args:
            server: The server, with the state before this round.
            messages: The clients' messages, possibly as `RestrictedMessages`.
            paths: Paths of the tensors to combine; None: all.
            rows: By tensor with row weights: the name of the tensor that holds its weights.
            sums: Paths of the tensors that are added up instead of averaged.

        Returns:
            The combined tensors, as `server.average` returns them.

        Raises:
            UserError: Too few messages are usable.
        """
        sent = _levelled(readable(messages), paths, rows)
        if self.settings.momentum:
            sent = (with_momentum(message, server, rows, sums, self.settings.momentum) for message in sent)
        mean = WeightedMean(server.state, paths, rows, sums)
        if self.settings.bucket > 1:
            kept = list(sent)
            self._check(len(kept), f"sent a usable message in round {server.round}")
            sent = bucketed(kept, self.settings.bucket, self._orders(server.round), rows, sums)
        if self.settings.clip is not None:
            return self._clipped_mean(server, sent, mean, rows, sums, self.settings.clip)
        kept = list(sent)
        if not kept or not kept[0]:
            return {}
        if self.settings.bucket == 1:
            self._check(len(kept), f"sent a usable message in round {server.round}")
        if self.settings.rule in ("median", "trimmed"):
            found = self._by_coordinate(server.state, kept, rows, sums)
            return {name: value for name, value in found.items() if paths is None or under(name, paths)}
        weights = self._weights(kept, server.state, rows)
        return mean.of(_weighed(kept, weights, rows, sums))

    def _clipped_mean(
        self,
        server: Server,
        sent: Iterable[Message],
        mean: WeightedMean,
        rows: Mapping[str, str],
        sums: tuple[str, ...],
        bound: float,
    ) -> State:
        """Return the mean of messages clipped around the server's state, which `centred` moves by the last update."""
        start = {name: value for name, value in server.state.items() if not under(name, sums)}  # sums start at zero
        centred = self.settings.rule == "centred"
        if centred:
            start |= {name: start[name] + value for name, value in last_centre(server).items() if name in start}
        found = mean.of((_clipped(message, start, rows, bound), 1.0) for message in sent)
        if centred:
            store_centre(server, found, sums)
        return found

    def _weights(self, kept: list[Message], old: State, rows: Mapping[str, str]) -> list[float]:
        """Return a weight for every message; the weights add up to the number of messages."""
        names = [n for n, v in kept[0].items() if v.is_floating_point() and n not in rows.values()]
        distances = squared_distances([torch.stack([_update(m, n, old, rows) for m in kept]) for n in names])
        if self.settings.rule == "geometric":
            return [float(w) * len(kept) for w in geometric_weights(distances)]
        attackers = self.settings.attackers
        assert attackers is not None
        count = 1 if self.settings.rule == "krum" else len(kept) - attackers
        chosen = krum_scores(distances, attackers).argsort(stable=True)[:count].tolist()
        return [len(kept) / count if i in chosen else 0.0 for i in range(len(kept))]

    def _by_coordinate(self, old: State, kept: list[Message], rows: Mapping[str, str], sums: tuple[str, ...]) -> State:
        """Combine one tensor at a time: memory is the messages plus all clients' copies of one tensor in float64."""
        found: State = {}
        for name, example in kept[0].items():
            values = torch.stack([message[name] for message in kept])
            if name in rows.values():
                centre = values.sum(0)
            elif name in rows:
                held = torch.stack([message[rows[name]] for message in kept]) > 0
                centre = _row_by_row(values, held, self._centre, old.get(name))
            elif not example.is_floating_point():
                centre = values.median(0).values
            else:
                centre = self._centre(values)
            added = under(name, sums)
            if added and name not in rows.values():
                centre = centre * len(kept)
            if added and name in old:  # as in a plain sum, the old value stays where the sum is zero
                centre = torch.where(centre != 0, centre, old[name])
            found[name] = centre.to(example.dtype)
        return found

    def _centre(self, values: Tensor) -> Tensor:
        trim = self.settings.trim
        return median(values) if trim is None else trimmed_mean(values, _cut(trim, len(values)))


READS = "reads single clients' messages in addition to the average, or instead of it, which no rule covers"


def unprotected(method: Method) -> str | None:
    """Return why a robust rule cannot protect a method, or None if a trial call of its `combine` shows no reason."""
    if method.pooled:
        return "pools all data in one place: no client sends anything"
    return READS if use_of_messages(method) == "reads" else None


def refusal_of(settings: RobustSettings, method: Method, reason: str) -> str:
    """Return the error message for a method that the rule cannot protect."""
    return (
        f"robust.rule = '{settings.rule}': method.name = '{method.name}' {reason}; "
        "choose a method that supports robust rules (see `fedloom methods NAME`), or remove the robust section"
    )


def _cut(trim: float, n: int) -> int:
    return int(trim * n + 1e-9)


def _levelled(messages: Iterable[Message], paths: tuple[str, ...] | None, rows: Mapping[str, str]) -> Iterator[Message]:
    """Yield the tensors to combine of each message that is finite, with row weights replaced by 0 or 1."""
    for message in messages:
        wanted = {
            name: (value > 0).to(value.dtype) if name in rows.values() else value
            for name, value in message.items()
            if paths is None or under(name, paths) or name in rows.values()
        }
        chosen = Message(wanted, client=message.client, samples=message.samples)
        if chosen.not_finite() is None:
            yield chosen


def _update(message: Message, name: str, old: State, rows: Mapping[str, str]) -> Tensor:
    """Return a client's tensor minus the server's old value (zero if it has none); 0 in rows it does not hold."""
    value = message[name].double()
    update = value - old[name].double() if name in old else value
    if name in rows:
        update = update * _as_rows(message[rows[name]] > 0, update)
    return update


def _as_rows(weight: Tensor, like: Tensor) -> Tensor:
    return weight.double().reshape(*weight.shape, *[1] * (like.dim() - weight.dim()))


def _clipped(message: Message, start: State, rows: Mapping[str, str], bound: float) -> Message:
    """Scale a message's distance from `start` (all combined floats, as one vector) to a norm of at most `bound`."""
    names = [n for n, v in message.items() if v.is_floating_point() and n not in rows.values()]
    updates = {name: _update(message, name, start, rows) for name in names}
    factor = clip_factor(joint_norm(list(updates.values())), bound)
    if factor == 1.0:
        return message
    moved = {name: (update * factor + start.get(name, 0)).to(message[name].dtype) for name, update in updates.items()}
    return Message(dict(message.items()) | moved, client=message.client, samples=message.samples)


def _weighed(
    kept: list[Message], weights: list[float], rows: Mapping[str, str], sums: tuple[str, ...]
) -> Iterator[tuple[Message, float]]:
    """Yield messages with positive weight for the weighted mean; row weights and addends are scaled by it."""
    for message, weight in zip(kept, weights, strict=True):
        if weight > 0:
            scaled = {
                name: value * weight
                for name, value in message.items()
                if value.is_floating_point() and (name in rows.values() or under(name, sums))
            }
            yield Message(dict(message.items()) | scaled, client=message.client), weight


def _row_by_row(values: Tensor, held: Tensor, centre: Callable[[Tensor], Tensor], old: Tensor | None) -> Tensor:
    """Return the centre of every row over the clients that hold it; the old row if no client holds it.

    `held` has a value per client and row, or per client.
    """
    if held.dim() == 1:
        return centre(values[held]) if old is None or held.any() else old
    result = values.new_zeros(values.shape[1:]) if old is None else old.to(values.dtype).clone()
    for row in held.any(0).nonzero()[:, 0].tolist():
        result[row] = centre(values[held[:, row], row]).to(result.dtype)
    return result
