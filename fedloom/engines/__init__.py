"""Where clients run: inline, worker processes, or the recorder that checks a method for the GPU."""

from fedloom.engines.base import ENGINES, Engine, EngineSettings
from fedloom.engines.inline import Inline
from fedloom.engines.processes import Processes
from fedloom.engines.replay import ReplayEngine
from fedloom.errors import UserError, nearest
from fedloom.lane import Setup


def make_engine(setup: Setup, settings: EngineSettings) -> Engine:
    """The engine that the settings name."""
    if settings.name not in ENGINES:
        raise UserError(f"engine.name = '{settings.name}' is unknown: {nearest(settings.name, ENGINES)}")
    return ENGINES[settings.name](setup, settings)


__all__ = ["ENGINES", "Engine", "EngineSettings", "Inline", "Processes", "ReplayEngine", "make_engine"]
