"""A multilayer perceptron for small images, tables and other flat inputs."""

from math import prod

from torch import nn

from fedloom.core.options import Count
from fedloom.core.protocols import Shape
from fedloom.models.base import SplitModel, register


@register("mlp")
class MLP(SplitModel):
    """Two fully connected layers (128, 64), for small images such as the 8×8 digits and for inputs of any shape.

    `norm` adds batch-norm after the first layer, which gives a very small model with buffers to send.
    """

    images = False
    taps = ("extractor.relu1", "extractor.relu2")

    def __init__(self, shape: Shape, classes: int, *, hidden: Count = 128, features: Count = 64, norm: bool = False):
        super().__init__()
        self.features = features
        self.extractor = nn.Sequential()
        self.extractor.add_module("flatten", nn.Flatten())
        self.extractor.add_module("fc1", nn.Linear(prod(shape), hidden))
        if norm:
            self.extractor.add_module("bn1", nn.BatchNorm1d(hidden))
        self.extractor.add_module("relu1", nn.ReLU())
        self.extractor.add_module("fc2", nn.Linear(hidden, features))
        self.extractor.add_module("relu2", nn.ReLU())
        self.head = nn.Linear(features, classes)
