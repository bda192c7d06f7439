"""MoCo v2 (He et al., 2020; Chen et al., 2020b)."""

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
    """The slow copy with a queue of the keys it made."""

    queue: Tensor
    pointer: Tensor

    def __init__(self, extractor: nn.Module, projector: nn.Module, momentum: float, keys: int, width: int):
        super().__init__(extractor, projector, momentum)
        self.register_buffer("queue", normalize(torch.randn(keys, width), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))


class MoCo(SelfSupervised):
    """A query matches its own key among a queue of earlier keys. MoCo v2: with the two-layer projector."""

    tau: Positive = 0.07
    """Temperature."""
    momentum: Positive = 0.99
    """How slowly the key encoder follows."""
    keys: Count = 1024
    """Length of the queue."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Projector, key encoder and queue; the latter two stay with the client."""
        model = super().equip(model)
        model.target = KeyEncoder(model.extractor, model.head, self.momentum, self.keys, self.width)
        return model

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Queries' and keys' representations."""
        return Views(super().encode(model, batch).online, cast(KeyEncoder, model.target)(batch.views))

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """The first view asks, the second is the key."""
        encoder = cast(KeyEncoder, model.target)
        assert projected.target is not None
        keys = projected.target[1]
        loss = moco(projected.online[0], keys, encoder.queue.clone(), self.tau)
        if remember:
            enqueue(encoder.queue, encoder.pointer, keys)
        return loss

    def begin(self, model: SplitModel) -> None:
        """The key encoder starts where the network is."""
        cast(KeyEncoder, model.target).start_at(model.extractor, model.head)

    def follow(self, model: SplitModel) -> None:
        """The key encoder moves after every step."""
        cast(KeyEncoder, model.target).follow(model.extractor, model.head)
