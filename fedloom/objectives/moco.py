"""MoCo v2: training without labels by matching queries with keys of a momentum network.

References: He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020; Chen et al.,
"Improved Baselines with Momentum Contrastive Learning", arXiv:2003.04297, 2020.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedloom.core.batches import Batch
from fedloom.core.options import Count, Positive
from fedloom.losses import enqueue, moco
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Slow, Views


class KeyEncoder(Slow):
    """Target network of MoCo, with a queue of the keys it computed."""

    queue: Tensor
    pointer: Tensor

    def __init__(self, extractor: nn.Module, projector: nn.Module, momentum: float, keys: int, width: int):
        super().__init__(extractor, projector, momentum)
        self.register_buffer("queue", normalize(torch.randn(keys, width), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))


class MoCo(SelfSupervised):
    """MoCo v2: each query is trained to match its own key among a queue of earlier keys."""

    tau: Positive = 0.07
    """Temperature τ of the loss."""
    momentum: Positive = 0.99
    """Momentum m of the key encoder; larger values make it follow more slowly."""
    keys: Count = 1024
    """Number of keys in the queue."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Add the projector, and the key encoder with its queue, which stay on the client."""
        model = super().equip(model)
        model.target = KeyEncoder(model.extractor, model.head, self.momentum, self.keys, self.width)
        return model

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Return the representations of queries and keys."""
        return Views(super().encode(model, batch).online, cast(KeyEncoder, model.target)(batch.views))

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Return the loss with the first view as query and the second as key."""
        encoder = cast(KeyEncoder, model.target)
        assert projected.target is not None
        keys = projected.target[1]
        loss = moco(projected.online[0], keys, encoder.queue.clone(), self.tau)
        if remember:
            enqueue(encoder.queue, encoder.pointer, keys)
        return loss

    def begin(self, model: SplitModel) -> None:
        """Copy the network into the key encoder."""
        cast(KeyEncoder, model.target).start_at(model.extractor, model.head)

    def follow(self, model: SplitModel) -> None:
        """Update the key encoder."""
        cast(KeyEncoder, model.target).follow(model.extractor, model.head)
