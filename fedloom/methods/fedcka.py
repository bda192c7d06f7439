"""FedCKA: local training keeps the early layers similar to the global model's.

The regulariser contrasts the similarity (centred kernel alignment, CKA) of each layer to the global model's with that
to the client's previous model's.

Reference: Son et al., "Comparisons Where It Matters: Using Layer-Wise Regularization to Improve Federated Learning on
Heterogeneous Data", Applied Sciences 2022.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.task import Task
from fedloom.losses import linear_cka
from fedloom.methods.moon import Remembering
from fedloom.models import SplitModel
from fedloom.models.base import tapped
from fedloom.models.projected import Tapped


class FedCKA(Remembering):
    """FedAvg whose early layers are kept closer (by CKA) to the global model's than to the previous local model's."""

    paper = (
        "Son et al., Comparisons Where It Matters: Using Layer-Wise Regularization to Improve Federated Learning on "
        "Heterogeneous Data, Applied Sciences 2022"
    )

    mu: float = 3.0
    """Weight μ of the regulariser; 0 gives FedAvg."""
    taps: tuple[str, ...] = ()
    """Layers to compare, by their names in the model; by default the first two of the network's `taps`."""
    projected: bool = False
    """Compare the outputs of projection heads on the layers, as FedIntR's code does, instead of raw activations."""
    width: int = 256
    """Output width of the projection heads."""

    def equipped(self, task: Task) -> SplitModel:
        """Return the network, with projection heads if `projected` is set."""
        model = task.model()
        model.taps = self.taps or model.taps[:2]
        return Tapped(model, model.taps, task.shape, self.width) if self.projected else model

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy plus μ times the mean over layers of −log(e^CKA(l,g) / (e^CKA(l,g) + e^CKA(l,p)))."""
        logits, layers = self.layers(client.model, batch.x)
        with torch.no_grad():
            _, layers_global = self.layers(client.received.model, batch.x)
            _, layers_previous = self.layers(client.previous, batch.x)
        triples = zip(layers, layers_global, layers_previous, strict=True)
        terms = [-logsigmoid(linear_cka(z, z_g) - linear_cka(z, z_p)) for z, z_g, z_p in triples]
        loss: Tensor = client.objective.classify(logits, batch.y)
        return loss + self.mu * torch.stack(terms).mean()

    def layers(self, model: SplitModel, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits and the outputs of the compared layers."""
        return model.layers(x) if isinstance(model, Tapped) else tapped(model, x, model.taps)
