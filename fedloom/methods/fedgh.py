"""FedGH: a global head, trained by the server on class representations (Yi et al., 2023)."""

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
    """Extractors stay with clients, who send class means; the server trains one head on them and sends it back."""

    paper = "Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM Multimedia 2023"
    shares = ()
    sends = ("means", "counts")
    receives = ("model.head",)
    reveals = CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    server_epochs: int = 1
    """Passes of the server over a round's class means."""
    server_batch: int = 1
    """Class means of one step of the server; the paper takes them one by one."""
    server_lr: float | None = None
    """The server's learning rate; the round's if not given."""
    personal_head: Literal["global", "local"] = "global"
    """Evaluate with the head that came back, or with the one that the client trained last (the authors' code)."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The extractor, and the last own head where it serves the client."""
        return ("model",) if self.personal_head == "local" else ("model.extractor",)

    def build(self, task: Task) -> dict[str, Part]:
        """The model; class means with their counts."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {"model": task.model(), "means": means, "counts": counts}

    def update(self, client: Client) -> None:
        """The global head replaces the own one, all is trained, class means are taken."""
        copy_(client.model.head, client.received.model.head)
        client.fit("model", self.loss)
        means, counts = class_means(*client.features(), len(client.counts))
        copy_(client.means, means)
        copy_(client.counts, counts)

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Every class mean of every client is a sample for the server's own head."""
        sent = [(message["means"], message["counts"] > 0) for message in messages]
        z = torch.cat([means[known] for means, known in sent])
        y = torch.cat([known.nonzero()[:, 0] for _, known in sent])
        server.fit(
            "model.head", self.head_loss, data=(z, y), epochs=self.server_epochs, batch_size=self.server_batch,
            lr=self.server_lr,
        )  # fmt: skip

    def head_loss(self, server: Client, batch: FeatureBatch) -> Tensor:
        """Cross-entropy of the head."""
        return cross_entropy(server.model.head(batch.x), batch.y)
