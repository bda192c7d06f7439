"""fedloom: personalised, representation-based federated learning. One short file per method, any engine.

The public API is imported on first use, so that `import fedloom` and the command line start without torch.

Example:
    >>> import fedloom
    >>> summary = fedloom.run(method="fedrep", data="digits", clients=10, rounds=5)
    >>> summary["personal_accuracy"]
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
    from fedloom.experiment.loop import Experiment
    from fedloom.inference.trained_model import load_model
    from fedloom.inference.trained_run import load
    from fedloom.methods import method
    from fedloom.runs.compare import compare, resume_comparison, table
    from fedloom.runs.run import resume, run
    from fedloom.runs.sweep import sweep

_MODULES = {
    "Batch": "core.batches", "Client": "core.client", "Experiment": "experiment.loop", "Message": "core.message",
    "Method": "core.method", "Recipe": "config.recipe", "Server": "core.server", "Task": "core.task",
    "UserError": "core.errors", "compare": "runs.compare", "load": "inference.trained_run",
    "load_model": "inference.trained_model", "method": "methods", "resume": "runs.run",
    "resume_comparison": "runs.compare", "run": "runs.run", "sweep": "runs.sweep", "table": "runs.compare",
}  # fmt: skip

__all__ = [
    "Batch", "Client", "Experiment", "Message", "Method", "Recipe", "Server", "Task", "UserError", "compare", "load",
    "load_model", "method", "resume", "resume_comparison", "run", "sweep", "table",
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
