"""FedAS: the received extractor is aligned with the client's earlier one, and averages are weighted by Fisher traces.

Reference: Yang et al., "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_, inner_product
from fedloom.core.task import Task
from fedloom.losses.class_means import class_means


class FedAS(Method):
    """FedPer with an extractor that first learns the class means of the client's last one, and a Fisher-weighted mean.

    The personal model is the client's last local one. A client's first round has no alignment, because there is no
    earlier extractor.
    """

    paper = "Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024"
    shares = ("model.extractor",)
    sends = ("fisher",)
    keeps = ("model",)
    by: ClassVar[Mapping[str, str]] = {"model.extractor": "fisher"}
    reveals: ClassVar[Mapping[str, str]] = {
        "fisher": "how far the client's model is from fitting its data; it grows with the number of samples"
    }
    has_global = False
    learns_from = ("labels",)

    align_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs of the alignment."""
    align_lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the alignment, which is plain SGD."""
    fisher_batch: Annotated[int, Field(ge=1)] | None = None
    """Batch size of the Fisher trace, which adds up ‖∇ mean log p‖² over batches; null: the recipe's. 1 is exact."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, the class means of the client's earlier extractor, and the Fisher trace."""
        return {"model": task.model(), "means": torch.zeros(task.classes, task.features), "fisher": torch.zeros(())}

    def update(self, client: Client) -> None:
        """Align the received extractor, train the model, then compute the Fisher trace."""
        if not client.first:
            copy_(client.means, class_means(*client.features(), len(client.means))[0])
            copy_(client.model.extractor, client.received.model.extractor)
            client.fit("model.extractor", self.align, epochs=self.align_epochs, lr=self.align_lr, plain=True)
        client.fit("model", self.loss)
        client.steps(self.add_fisher, train="model", epochs=1, batch_size=self.fisher_batch)

    def align(self, client: Client, batch: Batch) -> Tensor:
        """Return the distance of features from their class mean, averaged within each class of the batch and added."""
        apart = (client.model.extractor(batch.x) - client.means[batch.y]).square().mean(1)
        members = (batch.y[:, None] == batch.y).sum(1)
        return (apart / members).sum()

    def add_fisher(self, client: Client, batch: Batch) -> None:
        """Add the squared gradient of the log-likelihood; in eval mode, which the received module is in."""
        state = dict(client.model.named_parameters()) | dict(client.model.named_buffers())
        outputs = functional_call(client.received.model, state, (batch.plain,))
        nll = cross_entropy(client.objective.class_logits(outputs), batch.y)
        parameters = [p for p in client.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(nll, parameters, allow_unused=True, materialize_grads=True)
        client.fisher.add_(inner_product(gradients, gradients))

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the extractors, weighted by the Fisher traces."""
        server.move(server.average(messages, self.shares, by=self.by))
