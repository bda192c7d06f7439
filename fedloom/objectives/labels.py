"""Supervised objective: cross-entropy with the labels."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.models import SplitModel
from fedloom.objectives.base import Objective


class Labels(Objective):
    """Cross-entropy with the labels, on the network's own classifier."""

    supervised: ClassVar[bool] = True

    def equip(self, model: SplitModel) -> SplitModel:
        """Return the network unchanged: its head is already a classifier."""
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the cross-entropy of the logits."""
        return cross_entropy(model(batch.x), batch.y)
