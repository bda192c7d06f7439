"""Networks with projection heads: on intermediate layers (FedIntR Fig. 2), or behind the extractor (MOON Fig. 3)."""

import torch
from torch import Tensor, nn

from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, tapped


class Tapped(SplitModel):
    """The same extractor and head, and a two-layer projection on each tapped layer."""

    def __init__(self, model: SplitModel, taps: tuple[str, ...], shape: Shape, width: int):
        super().__init__()
        self.extractor, self.head, self.features = model.extractor, model.head, model.features
        self.taps = taps or model.taps
        with torch.no_grad():
            _, layers = tapped(model.eval(), torch.zeros(1, *shape), self.taps)
        model.train()
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(layer.shape[1], width), nn.ReLU(), nn.Linear(width, width)) for layer in layers
        )

    def layers(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the projected output of every tapped layer [B, width]."""
        logits, outputs = tapped(self, x, self.taps)
        return logits, [project(output) for project, output in zip(self.projections, outputs, strict=True)]


class Projected(SplitModel):
    """The same extractor with a two-layer projection behind it; the classifier sits on that, or beside it (`side`)."""

    def __init__(self, model: SplitModel, classes: int, width: int, *, side: bool = False):
        super().__init__()
        self.extractor, self.features, self.side = model.extractor, model.features, side
        self.projection = nn.Sequential(nn.Linear(model.features, width), nn.ReLU(), nn.Linear(width, width))
        self.head = model.head if side else nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.both(x)[0]

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the projection [B, width]."""
        h = self.extractor(x)
        z = self.projection(h)
        return self.head(h if self.side else z), z
