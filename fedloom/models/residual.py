"""What the residual networks share: the basic block and He's initialisation (He et al., 2015 and 2016)."""

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """ReLU of two 3×3 convolutions with batch-norm, plus a shortcut (He et al., 2016, Fig. 2)."""

    def __init__(self, before: int, width: int, stride: int, shortcut: nn.Module):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] → [B, width, H/stride, W/stride], rounded up."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(residual + self.shortcut(x))


def initialise(network: nn.Module) -> None:
    """Convolutions from N(0, 2 / fan-out) (He et al., 2015, Eq. 14); other layers as torch makes them."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
