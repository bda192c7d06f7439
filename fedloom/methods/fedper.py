"""FedPer: a shared extractor and a personal head per client, trained together.

Reference: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.
"""

from collections.abc import Iterator
from typing import Literal

import torch

from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server, weighted_sum
from fedloom.core.state import under


class FedPer(Method):
    """FedAvg of the extractor, with a personal head per client; both are trained together."""

    paper = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    shares = ("model.extractor",)
    keeps = ("model.head",)

    average_heads: bool = False
    """Average the heads too, for evaluation as a global model (FedCRC's Table II); clients keep their own heads."""

    heads_of: Literal["participants", "all"] = "participants"
    """Heads to average: those of the round's participants, or the last heads of all clients that ever took part."""

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """The head, if `average_heads` is set."""
        return ("model.head",) if self.average_heads else ()

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """Whether heads are averaged into a global model; the paper has none."""
        return self.average_heads

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the messages. With `heads_of: all` the server stores every client's last head and averages those."""
        if not self.average_heads or self.heads_of == "participants":
            super().combine(server, messages)
            return
        server.move(server.average(_storing_heads(server, messages), self.shares))
        heads = [dict(server.clients[client]) for client in sorted(server.clients)]
        samples = [float(head.pop("samples")) for head in heads]
        server.move(weighted_sum(heads, [count / sum(samples) for count in samples]))


def _storing_heads(server: Server, messages: Iterator[Message]) -> Iterator[Message]:
    """Yield the messages; the server stores the head and the number of samples of each."""
    for message in messages:
        assert message.client is not None
        head = {name: value for name, value in message.items() if under(name, ("model.head",))}
        server.clients[message.client] = head | {"samples": torch.tensor(message.samples)}
        yield message
