"""SimSiam: training without labels by predicting the projection of another view, without negatives.

Reference: Chen and He, "Exploring Simple Siamese Representation Learning", CVPR 2021.
"""

from torch import Tensor, nn

from fedloom.losses import negative_cosine
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views, mlp


class Predicting(nn.Module):
    """A projector together with a predictor that is applied to its output; `forward` returns the projection."""

    def __init__(self, features: int, hidden: int, width: int):
        super().__init__()
        self.projector = mlp(features, hidden, width)
        self.predictor = mlp(width, hidden, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the projection."""
        z: Tensor = self.projector(h)
        return z


class SimSiam(SelfSupervised):
    """SimSiam: the prediction from one view is trained to match the other view's projection, without gradient to it."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Replace the head by a projector with a predictor; the server averages both with the network."""
        model.head = Predicting(model.features, self.hidden, self.width)
        return model

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Return the negative cosine, averaged over both directions."""
        head = model.head
        assert isinstance(head, Predicting)
        z1, z2 = projected.online
        return negative_cosine(head.predictor(z1), head.predictor(z2), z1, z2)
