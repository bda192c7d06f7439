"""The network of FedIntR (its §IV), where it is used on 32×32×3 images."""

from collections import OrderedDict

from torch import nn

from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, register
from fedloom.models.max_pooling import MaxPool2d


@register("cnn3")
class CNN3(SplitModel):
    """Three 3×3 convolutions (8, 16, 32) and layers of 128 and 96 features: FedIntR's network.

    The five taps are the layers that FedIntR compares: each pooling layer, and the ReLU of each fully connected layer.
    """

    smallest = 22
    taps = ("extractor.pool1", "extractor.pool2", "extractor.pool3", "extractor.relu4", "extractor.relu5")

    def __init__(self, shape: Shape, classes: int):
        super().__init__()
        channels, height, width = shape
        self.features = 96
        self.extractor = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 8, 3),
                relu1=nn.ReLU(),
                pool1=MaxPool2d(2),
                conv2=nn.Conv2d(8, 16, 3),
                relu2=nn.ReLU(),
                pool2=MaxPool2d(2),
                conv3=nn.Conv2d(16, 32, 3),
                relu3=nn.ReLU(),
                pool3=MaxPool2d(2),
                flatten=nn.Flatten(),
                fc4=nn.Linear(32 * _left(height) * _left(width), 128),
                relu4=nn.ReLU(),
                fc5=nn.Linear(128, self.features),
                relu5=nn.ReLU(),
            )
        )
        self.head = nn.Linear(self.features, classes)


def _left(side: int) -> int:
    """Return the side length after three unpadded 3×3 convolutions, each followed by pooling by two."""
    for _ in range(3):
        side = (side - 2) // 2
    return side
