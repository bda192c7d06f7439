"""Networks, each split into an extractor and a head, with named layers that methods may read."""

from importlib import import_module
from pkgutil import iter_modules

from fedloom.models.base import Shape, SplitModel, build, check, models, register, tapped

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Shape", "SplitModel", "build", "check", "models", "register", "tapped"]
