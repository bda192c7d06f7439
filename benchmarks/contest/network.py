"""Network of the workloads P and Q: pfl-research's `simple_cnn` for CIFAR-10, and the CNN with dropout for EMNIST.

Recipes name it like a user's model: `path/to/network.py:DropoutCNN`.
"""

from collections import OrderedDict

from torch import nn

from fedloom.core.rng import Dropout
from fedloom.models import MaxPool2d, Shape, SplitModel


class DropoutCNN(SplitModel):
    """Two unpadded 3×3 convolutions (32, 64), max-pooling, dropout, 128 features, dropout, a linear head."""

    smallest = 6

    def __init__(self, shape: Shape, classes: int):
        super().__init__()
        channels, height, width = shape
        self.features = 128
        self.extractor = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 3),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 64, 3),
                relu2=nn.ReLU(),
                pool=MaxPool2d(2),
                dropout1=Dropout(0.25),
                flatten=nn.Flatten(),
                fc=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), self.features),
                relu3=nn.ReLU(),
                dropout2=Dropout(0.5),
            )
        )
        self.head = nn.Linear(self.features, classes)
