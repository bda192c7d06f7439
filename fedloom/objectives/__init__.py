"""Objectives: labels, SimCLR, SimSiam, BYOL, MoCo v2, Barlow Twins."""

from importlib import import_module
from pkgutil import iter_modules

from fedloom.objectives.base import OBJECTIVES, Objective, SelfSupervised, Views, get, mlp

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["OBJECTIVES", "Objective", "SelfSupervised", "Views", "get", "mlp"]
