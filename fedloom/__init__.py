"""fedloom: personalised, representation-based federated learning. One short file a method; any engine beneath it.

What it gives is listed in `fedloom.public` and imported when it is asked for: Tab in a shell must not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module("fedloom.public"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("fedloom.public").__all__})
