"""Networks with projection heads: on intermediate layers (FedIntR, Fig. 2) or after the extractor (MOON, Fig. 3)."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.errors import UserError
from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, tapped


class Tapped(SplitModel):
    """A network with a two-layer projection head on each tapped layer; extractor and head are unchanged."""

    def __init__(
        self,
        model: SplitModel,
        taps: tuple[str, ...],
        shape: Shape,
        width: int,
        *,
        hidden: Literal["width", "input"] = "width",
    ):
        super().__init__()
        self.extractor, self.head, self.features = model.extractor, model.head, model.features
        self.taps = taps or model.taps
        with torch.no_grad():
            _, layers = tapped(model.eval(), torch.zeros(1, *shape), self.taps)
        model.train()
        sizes = [(layer.shape[1], layer.shape[1] if hidden == "input" else width) for layer in layers]
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, inside), nn.ReLU(), nn.Linear(inside, width)) for size, inside in sizes
        )

    def layers(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the projection [B, width] of each tapped layer."""
        logits, outputs = tapped(self, x, self.taps)
        return logits, [project(output) for project, output in zip(self.projections, outputs, strict=True)]


class Projected(SplitModel):
    """A network with a two-layer projection after its extractor; the head reads it, or with `side` the extractor."""

    def __init__(self, model: SplitModel, outputs: int, width: int, *, side: bool = False):
        super().__init__()
        self.extractor, self.features, self.side = model.extractor, model.features, side
        self.projection = nn.Sequential(nn.Linear(model.features, width), nn.ReLU(), nn.Linear(width, width))
        self.head = model.head if side else nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, outputs]."""
        return self.both(x)[0]

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the projection [B, width]."""
        h = self.extractor(x)
        z = self.projection(h)
        return self.head(h if self.side else z), z


def project(model: SplitModel, width: int, outputs: int) -> None:
    """Append a linear layer to a network's extractor, so that its representation has another width.

    The extractor becomes `extractor.network` followed by `extractor.project`. The head is replaced.

    Args:
        model: The network; changed in place.
        width: Width of the new representation.
        outputs: Number of the head's outputs.

    Raises:
        UserError: The network's head is not a single linear layer.
    """
    if not isinstance(model.head, nn.Linear):
        raise UserError(
            f"model.project = {width}: the network's head is a {type(model.head).__name__}, which cannot be replaced "
            "by a linear layer of another width; remove the field"
        )
    inner = OrderedDict(network=model.extractor, project=nn.Linear(model.features, width))
    model.extractor, model.head = nn.Sequential(inner), nn.Linear(width, outputs)
    model.features = width
    model.taps = tuple(name.replace("extractor.", "extractor.network.", 1) for name in model.taps)


@contextmanager
def batch_statistics(*models: nn.Module) -> Iterator[None]:
    """Make batch-norm layers use the batch's statistics, without updating their running statistics."""
    norms = [module for model in models for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, (training, track) in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = training, track
