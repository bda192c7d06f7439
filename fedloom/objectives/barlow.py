"""Barlow Twins: training without labels by decorrelating the features of two views.

Reference: Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.
"""

from torch import Tensor

from fedloom.core.options import Positive
from fedloom.losses import barlow_twins
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views


class Barlow(SelfSupervised):
    """Barlow Twins: the cross-correlation of two views' projections is trained towards the identity matrix."""

    lambd: Positive = 0.005
    """Weight λ of the off-diagonal terms."""

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Return the Barlow Twins loss between the projections."""
        return barlow_twins(*projected.online, self.lambd)
