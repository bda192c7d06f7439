"""Engines run clients: inline, in worker processes, in lanes on a GPU, on a Ray cluster, or recorded for checks."""

import torch

from fedloom.core.errors import UserError
from fedloom.core.setup import Setup
from fedloom.engines.base import ENGINES, Engine, EngineSettings, why_one_by_one
from fedloom.engines.cuda.lanes import Lanes
from fedloom.engines.inline import Inline
from fedloom.engines.processes import Processes
from fedloom.engines.ray import Ray
from fedloom.engines.replay import ReplayEngine

AUTO = "auto"


def make_engine(setup: Setup, settings: EngineSettings) -> Engine:
    """Return the engine that the settings name.

    `auto` means lanes if a GPU can be used and all clients have the same network, otherwise inline.

    Args:
        setup: The task, the method and the training settings.
        settings: The recipe's `engine` section.

    Raises:
        UserError: The engine is unknown or does not support the settings.

    Example:
        >>> with make_engine(setup, EngineSettings(name="processes", workers=4)) as engine:
        ...     results = list(engine.run(jobs))
    """
    if settings.clients_per_step > 1 and (why := why_one_by_one(setup)) is not None:
        raise UserError(f"engine.cohort = {settings.cohort}: {why}")
    if len(setup.variants) > 1 and settings.name == AUTO:
        settings = settings.model_copy(update={"name": Inline.name})
    return engine_class(settings)(setup, settings)


def engine_class(settings: EngineSettings) -> type[Engine]:
    """Return the class of engine that the settings name.

    Raises:
        UserError: The engine is unknown or does not support the settings.
    """
    name = settings.name
    if name == AUTO:
        name = "lanes" if settings.device != "cpu" and torch.cuda.is_available() else "inline"
    if name in ("gpu", "cuda"):
        raise UserError(
            f"engine.name = '{name}' is unknown: 'lanes' trains on a GPU, and '{AUTO}' uses it if there is one"
        )
    engine = ENGINES.find(name, also=[AUTO])
    if settings.device == "cuda" and not engine.gpu:
        able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].gpu))
        raise UserError(
            f"engine.device = 'cuda': the engine '{engine.name}' runs on CPUs only; set engine.name to one of: {able}"
        )
    if settings.client_timeout is not None and not engine.can_stop_clients:
        able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].can_stop_clients))
        raise UserError(
            f"engine.client_timeout = {settings.client_timeout:g}: the engine '{engine.name}' cannot stop a client "
            f"that takes too long; set engine.name to one of: {able}"
        )
    if settings.clients_per_step > 1:
        _refuse_cohort(engine, settings)
    return engine


def _refuse_cohort(engine: type[Engine], settings: EngineSettings) -> None:
    """Raise a UserError if the engine cannot vectorise clients, or not with these settings."""
    field = f"engine.cohort = {settings.cohort}"
    if not engine.vectorises:
        able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].vectorises))
        raise UserError(
            f"{field}: the engine '{engine.name}' trains one client at a time; set engine.name to one of: {able}"
        )
    if settings.deterministic:
        raise UserError(f"{field}: engine.deterministic trains one client at a time per lane; remove one setting")
    if settings.client_timeout is not None:
        raise UserError(
            f"{field}: engine.client_timeout cannot stop one of several clients that share training steps; remove one "
            "setting"
        )


__all__ = [
    "AUTO", "ENGINES", "Engine", "EngineSettings", "Inline", "Lanes", "Processes", "Ray", "ReplayEngine",
    "engine_class", "make_engine",
]  # fmt: skip
