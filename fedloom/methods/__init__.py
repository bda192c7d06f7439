"""Methods, one file each. `get("fedprox", mu=0.1)` makes one; `get("fedavg+ft")` adds fine-tuning."""

from typing import Any

from fedloom.core import options, trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.method import ADDONS, METHODS, Method, with_addon
from fedloom.core.options import field_docs, hyperparameters
from fedloom.core.registry import import_all, split
from fedloom.methods.addons.probes import Probed

import_all(__name__)


def method_class(name: str) -> type[Method]:
    """The class of a method, with what `+…` adds to it."""
    base, addons = split(name)
    addons = [addon.lower() for addon in addons]
    found = METHODS.get(base.lower()) or METHODS.find(base)
    if repeated := next((addon for i, addon in enumerate(addons) if addon in addons[:i]), None):
        raise UserError(f"method.name = '{name}': '+{repeated}' stands there twice; once is enough")
    for addon in addons:
        addition = ADDONS.look_up(addon)
        if addition is None:
            raise UserError(f"method.name = '{name}': '+{addon}' is unknown: {nearest(addon, ADDONS.names())}")
        if issubclass(found, addition):
            raise UserError(
                f"method.name = '{name}': {found.name} does what '+{addon}' adds already; set its hyperparameters"
            )
        if getattr(addition, "needs_global", False) and found.has_global is not True:  # a property: only if asked for
            raise UserError(
                f"method.name = '{name}': {found.name} has no global model that '+{addon}' could start from"
            )
        found = with_addon(found, addon, addition)
    return found


def get(name: str, **parameters: Any) -> Method:
    """A method with its hyperparameters, validated. A file in the name needs consent: the name may be a stranger's."""
    found = method_class(name)
    return found(**options.validated(options.declared(found), parameters, "method", name))


def method(name: str, **parameters: Any) -> Method:
    """Makes a method: `fedloom.method("fedprox", mu=0.1)`. A file that the name gives, `file.py:Name`, is imported."""
    trusted_code.allow(name)
    return get(name, **parameters)


__all__ = [
    "ADDONS", "METHODS", "Method", "Probed", "field_docs", "get", "hyperparameters", "method", "method_class",
    "with_addon",
]  # fmt: skip
