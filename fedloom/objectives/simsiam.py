"""SimSiam (Chen and He, 2021)."""

from torch import Tensor, nn

from fedloom.losses import negative_cosine
from fedloom.models import SplitModel
from fedloom.objectives.base import SelfSupervised, Views, mlp


class Predicting(nn.Module):
    """A projector with a predictor behind it; its output is the projection."""

    def __init__(self, features: int, hidden: int, width: int):
        super().__init__()
        self.projector = mlp(features, hidden, width)
        self.predictor = mlp(width, hidden, width)

    def forward(self, h: Tensor) -> Tensor:
        """The projection."""
        z: Tensor = self.projector(h)
        return z


class SimSiam(SelfSupervised):
    """A prediction from one view matches the other's projection, whose gradient is stopped."""

    def equip(self, model: SplitModel) -> SplitModel:
        """Projector and predictor; both travel with the network."""
        model.head = Predicting(model.features, self.hidden, self.width)
        return model

    def compare(self, model: SplitModel, projected: Views, *, remember: bool = True) -> Tensor:
        """Symmetric negative cosine."""
        head = model.head
        assert isinstance(head, Predicting)
        z1, z2 = projected.online
        return negative_cosine(head.predictor(z1), head.predictor(z2), z1, z2)
