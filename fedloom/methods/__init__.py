"""Methods, one file each. `get("fedprox", mu=0.1)` makes one; `get("fedavg+ft")` adds fine-tuning."""

import importlib
import pkgutil
from dataclasses import MISSING, fields
from inspect import get_annotations
from types import new_class
from typing import Any, cast

from pydantic import ConfigDict, create_model

from fedloom import plugins
from fedloom.checking import checked
from fedloom.errors import UserError, nearest
from fedloom.methods.base import REGISTRY, Method
from fedloom.methods.declared import field_docs, hyperparameters
from fedloom.methods.finetune import FineTuned
from fedloom.methods.heads import Linear, LogReg, Mlp, Svm
from fedloom.methods.probes import Probed

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

EXTRAS: dict[str, type[Method]] = {
    "ft": FineTuned, "linear": Linear, "mlp": Mlp, "svm": Svm, "logreg": LogReg, "probe": Probed,
}  # fmt: skip
"""What can be added to a method's name."""
METHODS = plugins.Kind(
    "fedloom.methods", "method.name =", "a subclass of fedloom.Method",
    lambda thing: isinstance(thing, type) and issubclass(thing, Method) and thing is not Method,
)  # fmt: skip


def method_class(name: str) -> type[Method]:
    """The class of a method, with what `+…` adds to it."""
    base, extras = plugins.split(name)
    extras = [extra.lower() for extra in extras]
    found = REGISTRY.get(base.lower()) or plugins.find(METHODS, base)
    if found is None:
        choice = nearest(base.lower(), [*REGISTRY, *plugins.names(METHODS)])
        raise UserError(f"method.name = '{base}' is unknown: {choice}, or one of yours: path/to/file.py:Name")
    if repeated := next((extra for i, extra in enumerate(extras) if extra in extras[:i]), None):
        raise UserError(f"method.name = '{name}': '+{repeated}' stands there twice; once is enough")
    for extra in extras:
        if extra not in EXTRAS:
            raise UserError(f"method.name = '{name}': '+{extra}' is unknown: {nearest(extra, EXTRAS)}")
        addition = EXTRAS[extra]
        if issubclass(found, addition):
            raise UserError(
                f"method.name = '{name}': {found.name} does what '+{extra}' adds already; set its hyperparameters"
            )
        if getattr(addition, "needs_global", False) and found.has_global is not True:  # a property: only if asked for
            raise UserError(
                f"method.name = '{name}': {found.name} has no global model that '+{extra}' could start from"
            )
        found = added(found, extra)
    return cast(type[Method], found)


def added(base: type[Method], extra: str) -> type[Method]:
    """The method with an addition's behaviour.

    Where both have a hyperparameter, the addition's default counts only if the addition itself sets it.
    """
    addition = EXTRAS[extra]
    own = get_annotations(addition)
    kept = {f.name: f for f in fields(base) if f.name not in own}
    body = {"__annotations__": {name: f.type for name, f in kept.items()}} | {
        name: f.default for name, f in kept.items()
    }
    docs = f"{(base.__doc__ or '').splitlines()[0]} {(addition.__doc__ or '').splitlines()[0]}"
    name = f"{base.name}+{extra}"
    found: Any = new_class(
        name, (addition, base), {"abstract": True}, lambda space: space.update(body, __doc__=docs, __module__=__name__)
    )
    found.name, found.plain = name, base.plain
    return cast(type[Method], found)


def get(name: str, **parameters: Any) -> Method:
    """A method with its hyperparameters, checked."""
    found = method_class(name)
    known = {f.name: f for f in fields(found)}
    for parameter, value in parameters.items():
        if parameter not in known:
            choice = nearest(parameter, known) if known else f"{name} has none"
            raise UserError(f"method.{parameter} = {value!r}: {name} has no such hyperparameter: {choice}")
    values: Any = {n: (f.type, ... if f.default is MISSING else f.default) for n, f in known.items()}
    model = create_model(found.__name__, __config__=ConfigDict(extra="forbid"), **values)
    read = checked(model, parameters, "method")
    return found(**{n: getattr(read, n) for n in parameters})


__all__ = [
    "EXTRAS", "METHODS", "REGISTRY", "Method", "Probed", "added", "field_docs", "get", "hyperparameters",
    "method_class",
]  # fmt: skip
