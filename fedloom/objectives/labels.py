"""Cross-entropy with the labels."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.batches import Batch
from fedloom.models import SplitModel
from fedloom.objectives.base import Objective


class Labels(Objective):
    """The network keeps its classifier."""

    supervised: ClassVar[bool] = True

    def equip(self, model: SplitModel) -> SplitModel:
        """The head is a classifier already."""
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Cross-entropy of the logits."""
        return cross_entropy(model(batch.x), batch.y)
