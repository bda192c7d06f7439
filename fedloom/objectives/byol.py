"""BYOL (Grill et al., 2020)."""

from typing import cast

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.options import Positive
from fedloom.losses import byol
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Slow, Views
from fedloom.objectives.simsiam import Predicting


class BYOL(SelfSupervised):
    """A prediction from one view matches the slow copy's projection of the other."""

    momentum: Positive = 0.99
    """How slowly the target follows."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Projector, predictor, and the target, which stays with the client."""
        model.head = head = Predicting(model.features, self.hidden, self.width)
        model.target = Slow(model.extractor, head.projector, self.momentum)
        return model

    def encode(self, model: SplitModel, batch: Batch) -> Views:
        """Representations by the network and by its target."""
        return Views(super().encode(model, batch).online, cast(Slow, model.target)(batch.views))

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Symmetric."""
        head = cast(Predicting, model.head)
        assert projected.target is not None
        p1, p2 = (head.predictor(z) for z in projected.online)
        return byol(p1, p2, *projected.target)

    def begin(self, model: SplitModel) -> None:
        """The target starts where the network is."""
        cast(Slow, model.target).start_at(model.extractor, cast(Predicting, model.head).projector)

    def follow(self, model: SplitModel) -> None:
        """The target moves after every step."""
        cast(Slow, model.target).follow(model.extractor, cast(Predicting, model.head).projector)
