"""Where clients run: inline, worker processes, lanes on a GPU, a Ray cluster, or the recorder that checks methods."""

import torch

from fedloom.core.workspace import Setup
from fedloom.engines.base import ENGINES, Engine, EngineSettings
from fedloom.engines.cuda.lanes import Lanes
from fedloom.engines.inline import Inline
from fedloom.engines.processes import Processes
from fedloom.engines.ray import Ray
from fedloom.engines.replay import ReplayEngine

AUTO = "auto"


def make_engine(setup: Setup, settings: EngineSettings) -> Engine:
    """The engine that the settings name; `auto` is lanes where there is a GPU to use, inline elsewhere."""
    return engine_class(settings)(setup, settings)


def engine_class(settings: EngineSettings) -> type[Engine]:
    """The kind of engine that the settings ask for."""
    name = settings.name
    if name == AUTO:
        name = "lanes" if settings.device != "cpu" and torch.cuda.is_available() else "inline"
    return ENGINES.find(name)


__all__ = [
    "ENGINES",
    "Engine",
    "EngineSettings",
    "Inline",
    "Lanes",
    "Processes",
    "Ray",
    "ReplayEngine",
    "engine_class",
    "make_engine",
]
