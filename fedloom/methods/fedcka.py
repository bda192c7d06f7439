"""FedCKA: early layers held like the global model's, by centred kernel alignment (Son et al., 2022)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.task import Task
from fedloom.losses import linear_cka
from fedloom.methods.moon import Remembering
from fedloom.models import SplitModel
from fedloom.models.base import tapped
from fedloom.models.projected import Tapped


class FedCKA(Remembering):
    """FedAvg whose first layers are more like the global model's than like the last local model's, measured by CKA."""

    paper = (
        "Son et al., Comparisons Where It Matters: Using Layer-Wise Regularization to Improve Federated Learning on "
        "Heterogeneous Data, Applied Sciences 2022"
    )

    mu: float = 3.0
    """Weight of the regulariser."""
    taps: tuple[str, ...] = ()
    """Layers to compare, by their names in the model; the first two of the model's own taps by default."""
    projected: bool = False
    """Compare layers through projection heads, as FedIntR's code does, instead of raw activations."""
    width: int = 256
    """Width of these projection heads."""

    def equipped(self, task: Task) -> SplitModel:
        """The network, with projection heads if asked for."""
        model = task.model()
        model.taps = self.taps or model.taps[:2]
        return Tapped(model, model.taps, task.shape, self.width) if self.projected else model

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy, and −log(e^CKA(l,g) / (e^CKA(l,g) + e^CKA(l,p))), the mean over layers."""
        logits, layers = self.layers(client.model, batch.x)
        with torch.no_grad():
            _, layers_global = self.layers(client.received.model, batch.x)
            _, layers_previous = self.layers(client.previous, batch.x)
        triples = zip(layers, layers_global, layers_previous, strict=True)
        terms = [-logsigmoid(linear_cka(z, z_g) - linear_cka(z, z_p)) for z, z_g, z_p in triples]
        return cross_entropy(logits, batch.y) + self.mu * torch.stack(terms).mean()

    def layers(self, model: SplitModel, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits and the layers that are compared."""
        return model.layers(x) if isinstance(model, Tapped) else tapped(model, x, model.taps)
