"""Networks, each split into an extractor and a head, with named layers that methods can read.

A recipe can name any `nn.Module` as `path/to/file.py:Class`. It is split at its last layer (`split_model`). For full
control, subclass `SplitModel` (see its example). `@register("name")` gives such a class a name.
"""

from fedloom.core.protocols import Shape
from fedloom.core.registry import import_all
from fedloom.models.base import MODELS, SplitModel, register, tapped
from fedloom.models.factory import Factory, build, check
from fedloom.models.lora import merge_adapters
from fedloom.models.max_pooling import MaxPool2d
from fedloom.models.plain import split_model

import_all(__name__)

__all__ = [
    "MODELS", "Factory", "MaxPool2d", "Shape", "SplitModel", "build", "check", "merge_adapters", "register",
    "split_model", "tapped",
]  # fmt: skip
