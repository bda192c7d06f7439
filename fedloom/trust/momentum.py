"""State of robust rules at the server: each client's momentum, and the last combined update.

Both are in `server.clients`, and so in checkpoints. The server keeps one message per client.

Reference: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021. There, workers
compute the momentum; here the server does, so that clients need no other code. Honest clients' messages have the same
effect.
"""

from collections.abc import Mapping

import torch

from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import State, under
from fedloom.core.task import EVERYONE

MOMENTUM, CENTRE = "momentum/", "centre/"
"""Prefixes of the names of these tensors."""


def with_momentum(
    message: Message, server: Server, rows: Mapping[str, str], sums: tuple[str, ...], beta: float
) -> Message:
    """Replace a client's update u by its momentum m ← (1 − β)·u + β·m, and store m.

    A client's first momentum is its update; likewise for each row with weights, whose momentum is NaN until the client
    holds the row.

    Args:
        message: The client's message; row weights are 0 or 1.
        server: The server, with the state before this round.
        rows: By tensor with row weights: the name of the tensor that holds its weights.
        sums: Paths of the tensors that are added up; their updates start at zero.
        beta: β, at least 0 and below 1.
    """
    assert message.client is not None
    known = server.clients.get(message.client, {})
    moved: State = {}
    stored: State = {}
    for name, value in message.items():
        if not value.is_floating_point() or name in rows.values():
            continue
        start = server.state[name].double() if name in server.state and not under(name, sums) else 0.0
        update = value.double() - start
        last = known.get(MOMENTUM + name)
        last = torch.full_like(update, torch.nan) if last is None else last.to(update)
        new = torch.where(last.isnan(), update, (1 - beta) * update + beta * last)
        if name in rows:
            held = message[rows[name]] > 0
            new = torch.where(held.reshape(*held.shape, *[1] * (new.dim() - held.dim())), new, last)
        stored[MOMENTUM + name] = new.to(value.dtype)
        moved[name] = torch.where(new.isnan(), value.double(), start + new).to(value.dtype)
    server.clients[message.client] = {**known, **stored}
    return Message({**message, **moved}, client=message.client, samples=message.samples)


def last_centre(server: Server) -> State:
    """Return the combined update of the last round; empty before the first one."""
    known = server.clients.get(EVERYONE, {})
    return {name.removeprefix(CENTRE): value for name, value in known.items() if name.startswith(CENTRE)}


def store_centre(server: Server, combined: Mapping[str, torch.Tensor], sums: tuple[str, ...]) -> None:
    """Store this round's combined update, of the tensors that are not added up."""
    centre = {
        CENTRE + name: value - server.state[name]
        for name, value in combined.items()
        if value.is_floating_point() and name in server.state and not under(name, sums)
    }
    server.clients[EVERYONE] = {**server.clients.get(EVERYONE, {}), **centre}
