"""Barlow Twins (Zbontar et al., 2021)."""

from torch import Tensor

from fedloom.core.options import Positive
from fedloom.losses import barlow_twins
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views


class Barlow(SelfSupervised):
    """The cross-correlation of two views' projections should be the identity."""

    lambd: Positive = 0.005
    """Weight of the off-diagonal terms."""

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Barlow Twins between the projections."""
        return barlow_twins(*projected.online, self.lambd)
