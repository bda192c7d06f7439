"""FedPer: a common base, personal last layers (Arivazhagan et al., 2019)."""

from collections.abc import Iterator
from typing import Literal

import torch

from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server
from fedloom.core.state import State, under


class FedPer(Method):
    """The extractor is everybody's, the head is each client's own; both are trained together."""

    paper = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    shares = ("model.extractor",)
    keeps = ("model.head",)

    average_heads: bool = False
    """Clients send their heads too, and their average is a global model (FedCRC's Table II); nobody receives it."""

    heads_of: Literal["participants", "all"] = "participants"
    """Whose heads: of the round's participants, or of all clients that ever took part, each with its last one."""

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """The head, where a global model is asked for."""
        return ("model.head",) if self.average_heads else ()

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """The paper has none."""
        return self.average_heads

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """The average; with `heads_of: all` the server remembers every client's head, and averages those."""
        if not self.average_heads or self.heads_of == "participants":
            super().combine(server, messages)
            return
        server.move(server.average(_remembered(server, messages), self.shares))
        heads = [dict(server.clients[client]) for client in sorted(server.clients)]
        weights = torch.stack([head.pop("samples") for head in heads]).double()
        mean: State = {
            name: torch.tensordot(weights / weights.sum(), torch.stack([head[name].double() for head in heads]), 1)
            for name in heads[0]
        }
        server.move({name: value.to(heads[0][name].dtype) for name, value in mean.items()})


def _remembered(server: Server, messages: Iterator[Message]) -> Iterator[Message]:
    """Messages as they come; of each the server keeps the head and the number of samples."""
    for message in messages:
        assert message.client is not None
        head = {name: value for name, value in message.items() if under(name, ("model.head",))}
        server.clients[message.client] = head | {"samples": torch.tensor(message.samples)}
        yield message
