"""MobileNet, version 1 (Howard et al., "MobileNets", arXiv:1704.04861, 2017, Table 1)."""

from torch import nn

from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, register

# Output width and stride of each separable block. Table 1 prints stride 2 for the last block, which contradicts the map
# sizes in the same table (7×7 in, 7×7 out).
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


@register("mobilenet")
class MobileNet(SplitModel):
    """MobileNet v1: thirteen depthwise-separable blocks, 1024 features (Howard et al., 2017).

    For images under 64 pixels the stem has no stride.
    """

    taps = tuple(f"extractor.block{block}" for block in (1, 3, 5, 11, 13))

    def __init__(self, shape: Shape, classes: int):
        super().__init__()
        channels, height, width = shape
        stride = 1 if min(height, width) < 64 else 2
        self.features = 1024
        self.extractor = nn.Sequential()
        self.extractor.add_module("conv1", nn.Conv2d(channels, 32, 3, stride, padding=1, bias=False))
        self.extractor.add_module("bn1", nn.BatchNorm2d(32))
        self.extractor.add_module("relu1", nn.ReLU())
        before = 32
        for number, (after, stride) in enumerate(BLOCKS, start=1):
            self.extractor.add_module(f"block{number}", _separable(before, after, stride))
            before = after
        self.extractor.add_module("pool", nn.AdaptiveAvgPool2d(1))
        self.extractor.add_module("flatten", nn.Flatten())
        self.head = nn.Linear(self.features, classes)


def _separable(before: int, after: int, stride: int) -> nn.Sequential:
    """Return a 3×3 convolution per channel and a 1×1 convolution over channels, each with batch-norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, before, 3, stride, padding=1, groups=before, bias=False),
        nn.BatchNorm2d(before),
        nn.ReLU(),
        nn.Conv2d(before, after, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )
