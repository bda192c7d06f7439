"""Networks, each split into an extractor and a head, with named layers that methods can read.

To add a network, subclass `SplitModel` (see its example) and name it in a recipe as `path/to/file.py:Class`, or
register it with `@register("name")`.
"""

from fedloom.core.protocols import Shape
from fedloom.core.registry import import_all
from fedloom.models.base import MODELS, Factory, SplitModel, build, check, register, tapped

import_all(__name__)

__all__ = ["MODELS", "Factory", "Shape", "SplitModel", "build", "check", "register", "tapped"]
