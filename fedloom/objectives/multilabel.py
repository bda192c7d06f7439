"""Supervised objective for several labels per sample: binary cross-entropy of one logit per label."""

from typing import ClassVar

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.options import Positive
from fedloom.models import SplitModel
from fedloom.objectives.base import Objective
from fedloom.objectives.binary import binary_loss


class Multilabel(Objective):
    """Binary cross-entropy of one logit per label, mean over labels, for samples with any number of labels."""

    supervised: ClassVar[bool] = True
    multilabel: ClassVar[bool] = True

    pos_weight: Positive = 1.0
    """Weight of the loss of labels that a sample has, as in torch; above 1 if labels are rare."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Return the network unchanged: its head has one output per label."""
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the loss of the network's logits."""
        return self.classify(model(batch.x), batch.y)

    def classify(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits [B, L] with labels [B, L] of 0 and 1."""
        return binary_loss(logits, labels, self.pos_weight)
