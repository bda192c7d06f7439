"""FedGH: the server trains one global head on the clients' class means; extractors stay on the clients.

Reference: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import FeatureBatch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.losses.class_means import CLASS_STATISTICS, class_means


class FedGH(Method):
    """Local extractors with a global head, which the server trains on the class means that clients send."""

    paper = "Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM Multimedia 2023"
    shares = ()
    sends = ("means", "counts")
    receives = ("model.head",)
    reveals = CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    server_epochs: int = 1
    """Epochs in which the server trains the head on a round's class means."""
    server_batch: int = 1
    """Batch size of the server's training; the paper's is 1, one class mean per step."""
    server_lr: float | None = None
    """Learning rate of the server; by default the round's."""
    personal_head: Literal["global", "local"] = "global"
    """Head of the personal model: the server's, or the one the client trained last (the authors' code)."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The extractor; with `personal_head: local` the client's head too."""
        return ("model",) if self.personal_head == "local" else ("model.extractor",)

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, and class means with their counts."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {"model": task.model(), "means": means, "counts": counts}

    def update(self, client: Client) -> None:
        """Replace the head by the global one, train the whole model, then compute class means."""
        copy_(client.model.head, client.received.model.head)
        client.fit("model", self.loss)
        means, counts = class_means(*client.features(), len(client.counts))
        copy_(client.means, means)
        copy_(client.counts, counts)

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Train the server's head; each class mean of each client is one sample."""
        sent = [(message["means"], message["counts"] > 0) for message in messages]
        z = torch.cat([means[known] for means, known in sent])
        y = torch.cat([known.nonzero()[:, 0] for _, known in sent])
        server.fit(
            "model.head", self.head_loss, data=(z, y), epochs=self.server_epochs, batch_size=self.server_batch,
            lr=self.server_lr,
        )  # fmt: skip

    def head_loss(self, server: Client, batch: FeatureBatch) -> Tensor:
        """Return the cross-entropy of the head."""
        return cross_entropy(server.objective.class_logits(server.model.head(batch.x)), batch.y)
