"""Robust combination: what takes the mean's place in `server.average` where some clients may be hostile.

Whatever the rule:
- every client counts alike: a sample count is the client's own claim;
- row weights (`by={"means": "counts"}`) count as 1 where a client holds a row and 0 where it does not, and a row is
  combined over those that hold it; the sum of such weights is therefore the number of its holders;
- other `sums` become the number of clients times the centre of what they sent;
- integers take the maximum, as without a rule (Krum: of the chosen clients; median and trimmed mean: their median);
- a message that holds a number that is not finite is left out.

`clip` streams, in the memory of one message. All other rules hold a round's messages at once: clients × bytes up.
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
from fedloom.trust.access import opened, use_of_messages
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

Rule = Literal["clip", "median", "trimmed", "krum", "multikrum", "geometric"]
NEEDS: dict[Rule, tuple[str, ...]] = {
    "clip": ("clip",), "median": (), "trimmed": ("trim",), "krum": ("attackers",), "multikrum": ("attackers",),
    "geometric": (),
}  # fmt: skip


class RobustSettings(Section):
    """How messages are combined where some clients may be hostile."""

    rule: Rule = Field(description="clip, median, trimmed, krum, multikrum or geometric")
    clip: float | None = Field(None, gt=0, description="clip: the largest L2 norm of a client's whole update")
    trim: float | None = Field(None, gt=0, lt=0.5, description="trimmed: the share cut off at either end")
    attackers: int | None = Field(None, ge=0, description="krum, multikrum: how many hostile clients a round may have")

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
                    f"robust.{field} = {value:g}: the rule {self.rule} does not use it ({users} does); remove it"
                )
        return self


class RobustAverage:
    """A rule in the place of the weighted mean."""

    def __init__(self, settings: RobustSettings, method: Method, expected: int):
        self.settings = settings
        self.refusal = refusal_of(settings, method, READS)
        if reason := unprotected(method):
            raise UserError(refusal_of(settings, method, reason))
        self._check(expected, "take part in a round")

    def _check(self, n: int, what: str) -> None:
        """Whether so few messages can be combined by this rule."""
        rule, attackers, trim = self.settings.rule, self.settings.attackers, self.settings.trim
        if attackers is not None and n < krum_needs(attackers):
            most = (n - 3) // 2
            remedy = f"set it to {most} at most, or let more take part" if most >= 0 else "let more take part"
            raise UserError(
                f"robust.attackers = {attackers}: {rule} needs {krum_needs(attackers)} clients (2f + 3), "
                f"and {n} {what}; {remedy} (training.fraction, data.clients)"
            )
        if trim is not None and _cut(trim, n) == 0:
            raise UserError(
                f"robust.trim = {trim:g}: cuts nobody off where {n} clients {what}; "
                + (
                    f"set it to {1 / n:.3g} or more"
                    if n > 2
                    else "let more take part (training.fraction, data.clients)"
                )
            )

    def average(
        self,
        server: Server,
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: Mapping[str, str],
        sums: tuple[str, ...],
    ) -> State:
        """What `server.average` returns under this rule."""
        sent = _levelled(opened(messages), paths, rows)
        mean = WeightedMean(server.state, paths, rows, sums)
        if self.settings.clip is not None:
            bound = self.settings.clip
            clipped = (_clipped(message, server.state, rows, sums, bound) for message in sent)
            return mean.of((message, 1.0) for message in clipped)
        kept = list(sent)
        if not kept or not kept[0]:
            return {}
        self._check(len(kept), f"sent something usable in round {server.round}")
        if self.settings.rule in ("median", "trimmed"):
            found = self._by_coordinate(server.state, kept, rows, sums)
            return {name: value for name, value in found.items() if paths is None or under(name, paths)}
        weights = self._weights(kept, server.state, rows)
        return mean.of(_weighed(kept, weights, rows, sums))

    def _weights(self, kept: list[Message], old: State, rows: Mapping[str, str]) -> list[float]:
        """A weight for every message; they add up to the number of messages."""
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
        """One tensor after another: besides the messages, the largest tensor of all clients in float64, sorted."""
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
            if added and name in old:  # as in a plain sum, the old value stays where nothing was sent
                centre = torch.where(centre != 0, centre, old[name])
            found[name] = centre.to(example.dtype)
        return found

    def _centre(self, values: Tensor) -> Tensor:
        trim = self.settings.trim
        return median(values) if trim is None else trimmed_mean(values, _cut(trim, len(values)))


READS = "looks at single clients' messages beside the average, or instead of it, where no rule reaches"


def unprotected(method: Method) -> str | None:
    """Why a robust rule in the place of the mean would not protect a method, as far as a rehearsal shows."""
    if method.pooled:
        return "pools all data in one place: no client sends anything"
    return READS if use_of_messages(method) == "reads" else None


def refusal_of(settings: RobustSettings, method: Method, reason: str) -> str:
    """What a user is told whose method the rule cannot protect."""
    return (
        f"robust.rule = '{settings.rule}': method.name = '{method.name}' {reason}; "
        "choose another (`fedloom methods NAME` says which can), or remove the robust section"
    )


def _cut(trim: float, n: int) -> int:
    return int(trim * n + 1e-9)


def _levelled(messages: Iterable[Message], paths: tuple[str, ...] | None, rows: Mapping[str, str]) -> Iterator[Message]:
    """What is to be combined of each message, if its numbers are finite; row weights say only who holds a row."""
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
    """How far a client went from the server's old value (from zero where there is none); 0 in rows it does not hold."""
    value = message[name].double()
    update = value - old[name].double() if name in old else value
    if name in rows:
        update = update * _as_rows(message[rows[name]], update)
    return update


def _as_rows(weight: Tensor, like: Tensor) -> Tensor:
    return weight.double().reshape(-1, *[1] * (like.dim() - 1))


def _clipped(message: Message, old: State, rows: Mapping[str, str], sums: tuple[str, ...], bound: float) -> Message:
    """The message with its whole update (all floats that are combined, jointly) in a ball around the old state."""
    names = [n for n, v in message.items() if v.is_floating_point() and n not in rows.values()]
    start = {name: value for name, value in old.items() if not under(name, sums)}  # a sum starts at zero
    updates = {name: _update(message, name, start, rows) for name in names}
    factor = clip_factor(joint_norm(list(updates.values())), bound)
    if factor == 1.0:
        return message
    moved = {name: (update * factor + start.get(name, 0)).to(message[name].dtype) for name, update in updates.items()}
    return Message(dict(message.items()) | moved, client=message.client, samples=message.samples)


def _weighed(
    kept: list[Message], weights: list[float], rows: Mapping[str, str], sums: tuple[str, ...]
) -> Iterator[tuple[Message, float]]:
    """Messages for the plain mean: those of some weight, which also goes into their row weights and addends."""
    for message, weight in zip(kept, weights, strict=True):
        if weight > 0:
            scaled = {
                name: value * weight
                for name, value in message.items()
                if value.is_floating_point() and (name in rows.values() or under(name, sums))
            }
            yield Message(dict(message.items()) | scaled, client=message.client), weight


def _row_by_row(values: Tensor, held: Tensor, centre: Callable[[Tensor], Tensor], old: Tensor | None) -> Tensor:
    """The centre of every row over the clients that hold it; the old row where nobody does."""
    result = values.new_zeros(values.shape[1:]) if old is None else old.to(values.dtype).clone()
    for row in held.any(0).nonzero()[:, 0].tolist():
        result[row] = centre(values[held[:, row], row]).to(result.dtype)
    return result
