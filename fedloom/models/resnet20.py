"""ResNet-20 for CIFAR (He et al., CVPR 2016, §4.2)."""

from collections import OrderedDict
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, register
from fedloom.models.norms import Norm, norm2d
from fedloom.models.resnet import BasicBlock, initialise


@register("resnet20")
class ResNet20(SplitModel):
    """CIFAR ResNet-20: three stages of three blocks (16, 32, 64), with shortcuts without parameters.

    `fan: fan_out` initialises convolutions from N(0, 2 / fan-out). `fan_in` uses fan-in, for the head too, as FedIntR's
    code does. `norm: group` and `norm: layer` replace batch-norm by group norm, with up to 32 groups or with one. The
    taps are those of FedIntR: the first convolution (after batch-norm and ReLU) and the three stages.
    """

    taps = ("extractor.relu1", "extractor.stage1", "extractor.stage2", "extractor.stage3")

    def __init__(
        self, shape: Shape, classes: int, *, fan: Literal["fan_out", "fan_in"] = "fan_out", norm: Norm = "batch"
    ):
        super().__init__()
        self.features = 64
        self.extractor = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
                bn1=norm2d(norm, 16),
                relu1=nn.ReLU(),
                stage1=_stage(16, 16, 1, norm),
                stage2=_stage(16, 32, 2, norm),
                stage3=_stage(32, 64, 2, norm),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
            )
        )
        self.head = nn.Linear(self.features, classes)
        initialise(self, fan)
        if fan == "fan_in":
            nn.init.kaiming_normal_(self.head.weight)


class PaddedShortcut(nn.Module):
    """Shortcut of option A of the paper: every second pixel, with zeros in the new channels."""

    def __init__(self, more: int):
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + more, H/2, W/2], with half of the zero channels on either side."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))


def _stage(before: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    shortcut = nn.Identity() if before == width else PaddedShortcut(width - before)
    first = BasicBlock(before, width, stride, shortcut, norm)
    return nn.Sequential(first, *(BasicBlock(width, width, 1, nn.Identity(), norm) for _ in range(2)))
