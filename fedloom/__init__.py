"""fedloom: personalised, representation-based federated learning. One short file per method, any engine.

The public API is imported on first use, so that `import fedloom` and the command line start without torch.

Example:
    >>> import fedloom
    >>> run = fedloom.run(method="fedrep", data="digits", clients=10, rounds=5)
    >>> run["personal_accuracy"], run.clients
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.config.recipe import Recipe
    from fedloom.core.batches import Batch
    from fedloom.core.client import Client
    from fedloom.core.errors import UserError
    from fedloom.core.message import Message
    from fedloom.core.method import Method
    from fedloom.core.server import Server
    from fedloom.core.task import Task
    from fedloom.experiment.callbacks import Callback, StopRun
    from fedloom.experiment.loop import Experiment
    from fedloom.inference.trained_model import load_model
    from fedloom.methods import method
    from fedloom.runs.compare import compare, resume_comparison
    from fedloom.runs.result import Run, Runs, load
    from fedloom.runs.run import resume, run
    from fedloom.runs.sweep import sweep
    from fedloom.runs.table import table

_MODULES = {
    "Batch": "core.batches", "Callback": "experiment.callbacks", "Client": "core.client",
    "Experiment": "experiment.loop", "Message": "core.message", "Method": "core.method", "Recipe": "config.recipe",
    "Run": "runs.result", "Runs": "runs.result", "Server": "core.server", "StopRun": "experiment.callbacks",
    "Task": "core.task", "UserError": "core.errors", "compare": "runs.compare", "load": "runs.result",
    "load_model": "inference.trained_model", "method": "methods", "resume": "runs.run",
    "resume_comparison": "runs.compare", "run": "runs.run", "sweep": "runs.sweep", "table": "runs.table",
}  # fmt: skip

__all__ = [
    "Batch", "Callback", "Client", "Experiment", "Message", "Method", "Recipe", "Run", "Runs", "Server", "StopRun",
    "Task", "UserError",
    "compare", "load", "load_model", "method", "resume", "resume_comparison", "run", "sweep", "table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version(__name__)
    if name in _MODULES:
        module, _, attribute = _MODULES[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), attribute or name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
