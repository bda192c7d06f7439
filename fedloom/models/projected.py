"""A network whose intermediate layers are read through projection heads (FedIntR Fig. 2)."""

import torch
from torch import Tensor, nn

from fedloom.models.base import Shape, SplitModel, tapped


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
