"""Training objectives: classes, two classes or several labels; SimCLR, SimSiam, BYOL, MoCo v2 and Barlow Twins."""

from fedloom.core.registry import import_all
from fedloom.objectives.base import OBJECTIVES, Objective, SelfSupervised, Views, get, mlp

import_all(__name__)

__all__ = ["OBJECTIVES", "Objective", "SelfSupervised", "Views", "get", "mlp"]
