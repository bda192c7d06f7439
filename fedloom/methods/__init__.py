"""Federated learning methods, one file per paper.

`method("fedprox", mu=0.1)` makes a method from its name and hyperparameters. Add-ons follow the name: `fedavg+ft`.
"""

from typing import Any

from fedloom.core import options, trusted_code
from fedloom.core.errors import UserError, nearest
from fedloom.core.method import ADDONS, METHODS, Method, with_addon
from fedloom.core.options import field_docs, hyperparameters
from fedloom.core.registry import import_all, split
from fedloom.methods.addons.probes import Probed

import_all(__name__)


def method_class(name: str) -> type[Method]:
    """Return the class of a method, combined with the add-ons in its name.

    Args:
        name: A registered method or `path/to/file.py:Class`, followed by add-ons: `fedavg+ft`.

    Returns:
        A subclass of `Method`.

    Raises:
        UserError: The method or an add-on is unknown, an add-on is repeated, or it does not fit the method.
    """
    base, addons = split(name)
    addons = [addon.lower() for addon in addons]
    found = METHODS.get(base.lower()) or METHODS.find(base)
    if repeated := next((addon for i, addon in enumerate(addons) if addon in addons[:i]), None):
        raise UserError(f"method.name = '{name}': '+{repeated}' is given twice; remove one of them")
    for addon in addons:
        addition = ADDONS.look_up(addon)
        if addition is None:
            raise UserError(f"method.name = '{name}': '+{addon}' is unknown: {nearest(addon, ADDONS.names())}")
        if issubclass(found, addition):
            raise UserError(
                f"method.name = '{name}': {found.name} already does what '+{addon}' adds; "
                f"remove '+{addon}' and set the hyperparameters of {found.name}"
            )
        # has_global may be a property: then the global model is optional, and the class alone does not promise one
        if getattr(addition, "needs_global", False) and found.has_global is not True:
            raise UserError(
                f"method.name = '{name}': {found.name} has no global model, which '+{addon}' needs to start from"
            )
        found = with_addon(found, addon, addition)
    return found


def get(name: str, **parameters: Any) -> Method:
    """Make a method from a name that may come from an untrusted recipe.

    As `method`, except that a file in the name (`file.py:Name`) is imported only if the user has already consented to
    it.

    Args:
        name: A method, optionally with add-ons: `fedavg+ft`.
        **parameters: Hyperparameters; those not given have their defaults.

    Returns:
        The method.

    Raises:
        UserError: The name or a hyperparameter is unknown, a value is invalid, or the file is not trusted.
    """
    found = method_class(name)
    return found(**options.validated(options.declared(found), parameters, "method", name))


def method(name: str, **parameters: Any) -> Method:
    """Make a method from its name and hyperparameters.

    Args:
        name: A registered method or `path/to/file.py:Class`, optionally with add-ons: `fedavg+ft`. The file is
            imported, which runs its code.
        **parameters: Hyperparameters; those not given have their defaults.

    Returns:
        The method.

    Raises:
        UserError: The name or a hyperparameter is unknown, or a value is invalid.

    Example:
        >>> import fedloom
        >>> fedloom.method("fedprox", mu=0.5).mu
        0.5
    """
    trusted_code.allow(name)
    return get(name, **parameters)


__all__ = [
    "ADDONS", "METHODS", "Method", "Probed", "field_docs", "get", "hyperparameters", "method", "method_class",
    "with_addon",
]  # fmt: skip
