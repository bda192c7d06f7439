"""The network of FedCRL (§V-A4): the small CNN of FedAvg (McMahan et al., 2017) and of PFLlib."""

from collections import OrderedDict

from torch import nn

from fedloom.core.options import Count, Share
from fedloom.core.protocols import Shape
from fedloom.core.rng import Dropout
from fedloom.models.base import SplitModel, register
from fedloom.models.max_pooling import MaxPool2d


@register("cnn2")
class CNN2(SplitModel):
    """Two 5×5 convolutions (32, 64) and a layer of 128 features, with dropout: FedCRL's network.

    The paper gives a dropout rate (Table I) but not its place. Here dropout acts on the flattened feature maps, before
    the layer that produces the representation. So representations that are contrasted with class means are complete,
    and the head is one linear layer. Kernel sizes and widths are PFLlib's, and so is the ReLU on the representation.
    The paper's text has no ReLU there, which `signed` reproduces. With the ReLU and Adam, units may die permanently.
    """

    smallest = 16
    taps = ("extractor.pool1", "extractor.pool2", "extractor.relu3")

    def __init__(
        self, shape: Shape, classes: int, *, features: Count = 128, dropout: Share = 0.3, signed: bool = False
    ):
        super().__init__()
        channels, height, width = shape
        self.features = features
        self.extractor = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 5),
                relu1=nn.ReLU(),
                pool1=MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 5),
                relu2=nn.ReLU(),
                pool2=MaxPool2d(2),
                flatten=nn.Flatten(),
                dropout=Dropout(dropout),
                fc3=nn.Linear(64 * _left(height) * _left(width), features),
                relu3=nn.Identity() if signed else nn.ReLU(),
            )
        )
        self.head = nn.Linear(features, classes)


def _left(side: int) -> int:
    """Return the side length after two unpadded 5×5 convolutions, each followed by pooling by two."""
    return ((side - 4) // 2 - 4) // 2
