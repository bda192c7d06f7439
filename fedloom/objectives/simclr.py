"""SimCLR: training without labels by contrasting two views of an image with all other images of the batch.

Reference: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
"""

from torch import Tensor

from fedloom.core.options import Positive
from fedloom.losses import nt_xent
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views


class SimCLR(SelfSupervised):
    """SimCLR: two views of an image are drawn together and pushed away from all other images of the batch."""

    tau: Positive = 0.07
    """Temperature τ of the loss."""

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Return the NT-Xent loss between the projections."""
        return nt_xent(*projected.online, self.tau)
