"""BYOL: training without labels by predicting a target network's projection of another view.

Reference: Grill et al., "Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning", NeurIPS 2020.
"""

from typing import cast

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.options import Positive
from fedloom.losses import byol
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Slow, Views
from fedloom.objectives.simsiam import Predicting


class BYOL(SelfSupervised):
    """BYOL: the prediction from one view is trained to match the target network's projection of the other."""

    momentum: Positive = 0.99
    """Momentum m of the target network; larger values make it follow more slowly."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Add a projector with a predictor as the head, and the target network, which stays on the client."""
        model.head = head = Predicting(model.features, self.hidden, self.width)
        model.target = Slow(model.extractor, head.projector, self.momentum)
        return model

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Return the representations of two views, by the network and by its target network."""
        return Views(super().encode(model, batch).online, cast(Slow, model.target)(batch.views))

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Return the BYOL loss, summed over both directions."""
        head = cast(Predicting, model.head)
        assert projected.target is not None
        p1, p2 = (head.predictor(z) for z in projected.online)
        return byol(p1, p2, *projected.target)

    def begin(self, model: SplitModel) -> None:
        """Copy the network into its target network."""
        cast(Slow, model.target).start_at(model.extractor, cast(Predicting, model.head).projector)

    def follow(self, model: SplitModel) -> None:
        """Update the target network."""
        cast(Slow, model.target).follow(model.extractor, cast(Predicting, model.head).projector)
