"""ResNet-18 and ResNet-34 in the ImageNet layout (He et al., CVPR 2016, Table 1)."""

from typing import ClassVar, Literal

from torch import Tensor, nn

from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, register
from fedloom.models.max_pooling import MaxPool2d
from fedloom.models.norms import Norm, norm2d


class BasicBlock(nn.Module):
    """Residual block: two normalised 3×3 convolutions, plus a shortcut, then ReLU (He et al., 2016, Fig. 2)."""

    def __init__(self, before: int, width: int, stride: int, shortcut: nn.Module, norm: Norm = "batch"):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm2d(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm2d(norm, width)
        self.shortcut = shortcut
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, before, H, W] to [B, width, H/stride, W/stride], rounded up."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(residual + self.shortcut(x))


def initialise(network: nn.Module, fan: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Initialise convolutions from N(0, 2 / fan) (He et al., 2015, Eq. 10 and 14); other layers keep torch's values."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=fan, nonlinearity="relu")


class ResNet(SplitModel):
    """ResNet with four stages of basic blocks, of 64, 128, 256 and 512 channels.

    The first block of stages 2 to 4 has a stride of two and a projection shortcut. Images under 64 pixels get a small
    stem: a 3×3 convolution with stride 1 and no max-pooling. The usual (large) stem would reduce a 32×32 image to one
    pixel in the last stage. `stem: small` and `stem: large` choose a stem regardless of the image size;
    torchvision's networks have the large one.

    `norm: group` and `norm: layer` replace batch-norm, whose running statistics differ between clients, by group norm
    with up to 32 groups, or with one.
    """

    blocks: ClassVar[tuple[int, int, int, int]]
    taps = ("extractor.relu1", "extractor.stage1", "extractor.stage2", "extractor.stage3", "extractor.stage4")

    def __init__(
        self, shape: Shape, classes: int, *, stem: Literal["auto", "small", "large"] = "auto", norm: Norm = "batch"
    ):
        super().__init__()
        channels, height, width = shape
        small = min(height, width) < 64 if stem == "auto" else stem == "small"
        first = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        if not small:
            first = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.features = 512
        self.extractor = nn.Sequential()
        self.extractor.add_module("conv1", first)
        self.extractor.add_module("bn1", norm2d(norm, 64))
        self.extractor.add_module("relu1", nn.ReLU())
        if not small:
            self.extractor.add_module("pool1", MaxPool2d(3, stride=2, padding=1))
        self.extractor.add_module("stage1", _stage(64, 64, 1, self.blocks[0], norm))
        self.extractor.add_module("stage2", _stage(64, 128, 2, self.blocks[1], norm))
        self.extractor.add_module("stage3", _stage(128, 256, 2, self.blocks[2], norm))
        self.extractor.add_module("stage4", _stage(256, 512, 2, self.blocks[3], norm))
        self.extractor.add_module("pool", nn.AdaptiveAvgPool2d(1))
        self.extractor.add_module("flatten", nn.Flatten())
        self.head = nn.Linear(self.features, classes)
        initialise(self)

    def published_name(self, name: str) -> str:
        """Return the name that torchvision gives a tensor."""
        name = name.removeprefix("extractor.").replace("stage", "layer").replace(".shortcut.", ".downsample.")
        return name.replace("head.", "fc.")


@register("resnet18")
class ResNet18(ResNet):
    """ResNet-18 with 512 features (He et al., 2016); images under 64 pixels get a small stem."""

    blocks = (2, 2, 2, 2)


@register("resnet34")
class ResNet34(ResNet):
    """ResNet-34 with 512 features (He et al., 2016); images under 64 pixels get a small stem."""

    blocks = (3, 4, 6, 3)


def _stage(before: int, width: int, stride: int, blocks: int, norm: Norm) -> nn.Sequential:
    first = BasicBlock(before, width, stride, _shortcut(before, width, stride, norm), norm)
    return nn.Sequential(first, *(BasicBlock(width, width, 1, nn.Identity(), norm) for _ in range(blocks - 1)))


def _shortcut(before: int, width: int, stride: int, norm: Norm) -> nn.Module:
    """Return the shortcut of option B of the paper: a 1×1 projection where the shape changes."""
    if before == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), norm2d(norm, width))
