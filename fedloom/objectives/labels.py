"""Supervised objective: cross-entropy with the labels, optionally smoothed."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.core.options import Share
from fedloom.models import SplitModel
from fedloom.objectives.base import Objective


class Labels(Objective):
    """Cross-entropy with the labels, on the network's own classifier."""

    supervised: ClassVar[bool] = True

    smoothing: Share = 0.0
    """Label smoothing (Szegedy et al., 2016): share of the target that is spread evenly over all classes."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Return the network unchanged: its head is already a classifier."""
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the cross-entropy of the logits."""
        return self.classify(model(batch.x), batch.y)

    def classify(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy of logits with smoothed labels."""
        return cross_entropy(logits, labels, label_smoothing=self.smoothing)
