"""Where clients run: inline, worker processes, lanes on a GPU, a Ray cluster, or the recorder that checks methods."""

import torch

from fedloom.core.errors import UserError
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
    """The kind of engine that the settings ask for; a UserError if it cannot do what they ask."""
    name = settings.name
    if name == AUTO:
        name = "lanes" if settings.device != "cpu" and torch.cuda.is_available() else "inline"
    engine = ENGINES.find(name, also=[AUTO])
    if settings.device == "cuda" and not engine.gpu:
        able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].gpu))
        raise UserError(f"engine.device = 'cuda': the engine '{engine.name}' works on CPUs; engine.name can be {able}")
    if settings.client_timeout is not None and not engine.can_stop_clients:
        able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].can_stop_clients))
        raise UserError(
            f"engine.client_timeout = {settings.client_timeout:g}: the engine '{engine.name}' cannot stop a client "
            f"that takes too long; engine.name can be {able}"
        )
    return engine


__all__ = [
    "AUTO", "ENGINES", "Engine", "EngineSettings", "Inline", "Lanes", "Processes", "Ray", "ReplayEngine",
    "engine_class", "make_engine",
]  # fmt: skip
