"""Supervised objective for two classes: binary cross-entropy of one logit."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedloom.core.batches import Batch
from fedloom.core.errors import UserError
from fedloom.core.options import Positive
from fedloom.models import SplitModel
from fedloom.objectives.base import Objective


class Binary(Objective):
    """Binary cross-entropy on a head with one output, the logit of the second of two classes.

    `labels` trains two classes, too, with one logit each; the results of both are class predictions.
    """

    supervised: ClassVar[bool] = True

    pos_weight: Positive = 1.0
    """Weight of the loss of positive samples, as in torch; above 1 if positive samples are rare."""

    def outputs(self, classes: int) -> int:
        """Return 1.

        Raises:
            UserError: There are not two classes.
        """
        if classes != 2:
            raise UserError(
                f"objective.name = '{self.name}': it needs two classes, but the data have {classes}; use "
                "objective.name = labels"
            )
        return 1

    def equip(self, model: SplitModel) -> SplitModel:
        """Return the network unchanged: its head has one output."""
        return model

    def __call__(self, model: SplitModel, batch: Batch) -> Tensor:
        """Compute the loss of the network's logit."""
        return self.classify(model(batch.x), batch.y)

    def classify(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of logits [B, 1], or of two class logits [B, 2], whose difference is the logit."""
        logit = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        return binary_loss(logit, labels, self.pos_weight)

    def class_logits(self, outputs: Tensor) -> Tensor:
        """Return (0, s) for a logit s, whose softmax and cross-entropy are those of s; two logits stay as they are."""
        return outputs if outputs.shape[1] == 2 else torch.cat([torch.zeros_like(outputs), outputs], 1)


def binary_loss(logits: Tensor, labels: Tensor, pos_weight: float) -> Tensor:
    """Return the mean binary cross-entropy of logits and labels of the same shape, with weighted positives."""
    targets = labels.to(logits.dtype)
    weight = None if pos_weight == 1 else 1 + (pos_weight - 1) * targets  # equals torch's pos_weight for 0 and 1
    return binary_cross_entropy_with_logits(logits, targets, weight)
