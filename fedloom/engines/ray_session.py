"""The process's connection to Ray: a cluster's, or one that is started here, for nobody else."""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from fedloom.core.errors import UserError
from fedloom.core.signals import SIGNALS
from fedloom.engines.base import EngineSettings
from fedloom.engines.processes import cores


def import_ray() -> Any:
    """The package, which reads its environment when it is imported: no telemetry, nobody without the token."""
    if "ray" not in sys.modules:  # else Ray itself asks for a token, unless RAY_AUTH_MODE says otherwise
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"engine.name = 'ray' needs Ray, which cannot be imported ({error}): pip install 'fedloom[ray]'"
        ) from error
    return ray


@contextmanager
def connected(ray: Any, settings: EngineSettings) -> Iterator[None]:
    """Connects to a cluster, or starts Ray here and ends it; one that this process uses already is left as it is."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": settings.address}
    with ExitStack() as undo:
        if settings.address is None:
            cpus = (settings.workers or cores()) * settings.worker_cpus
            options = {"address": "local", "num_cpus": max(1, round(cpus)), "include_dashboard": False}
            _stay_here(undo, ray)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:  # Ray sets its own, and Ctrl-C is ours
                undo.callback(signal.signal, number, signal.getsignal(number))
        try:
            ray.init(log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UserError(
                f"engine.address = {settings.address!r}: Ray does not start or connect ({error}); a cluster's address "
                "is what `ray start --head` printed, its token must be in RAY_AUTH_TOKEN or ~/.ray/auth_token here too"
            ) from error
    try:
        yield
    finally:
        ray.shutdown(wait_for_processes=True)


def _stay_here(undo: ExitStack, ray: Any) -> None:
    """A Ray of this machine's own listens on the loopback address alone, and has a token and a session of its own.

    Ray listens so by itself on systems where it knows no clusters; the switch for that works on others too. In a
    session of its own it gets no signal that is sent to all of the program at once: a round can be finished.
    """
    constants = ray._private.ray_constants
    undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
    constants.ENABLE_RAY_CLUSTER = False
    if ray._private.utils.detect_fate_sharing_support():  # else Ray ends what is left behind by its process group
        services = ray._private.services
        undo.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
        services.ConsolePopen = partial(services.ConsolePopen, start_new_session=True)
    for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_AUTH_TOKEN", _token())):
        if name not in os.environ and not (name == "RAY_AUTH_TOKEN" and "RAY_AUTH_TOKEN_PATH" in os.environ):
            os.environ[name] = value
            undo.callback(os.environ.pop, name, None)


@cache
def _token() -> str:
    """Of this process's own Rays: Ray reads it once."""
    return secrets.token_hex(32)
