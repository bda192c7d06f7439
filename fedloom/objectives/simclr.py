"""SimCLR (Chen et al., 2020)."""

from torch import Tensor

from fedloom.core.options import Positive
from fedloom.losses import nt_xent
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views


class SimCLR(SelfSupervised):
    """Two views of an image attract, all other images repel."""

    tau: Positive = 0.07
    """Temperature."""

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """NT-Xent between the projections."""
        return nt_xent(*projected.online, self.tau)
