"""Methods, one file each. `get("fedprox", mu=0.1)` makes one; `get("fedavg+ft")` adds fine-tuning."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedloom.errors import UserError, nearest
from fedloom.methods.base import REGISTRY, Method, field_docs, hyperparameters
from fedloom.methods.finetune import FineTuned
from fedloom.methods.heads import Headed, LogReg, Mlp, Probed, Svm

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

EXTRAS: dict[str, type[Method]] = {
    "ft": FineTuned, "linear": Headed, "mlp": Mlp, "svm": Svm, "logreg": LogReg, "probe": Probed,
}  # fmt: skip
"""What can be added to a method's name."""


@cache
def method_class(name: str) -> type[Method]:
    """The class of a method, with what `+…` adds to it."""
    base, *extras = name.lower().split("+")
    if base not in REGISTRY:
        raise UserError(f"method.name = '{base}' is unknown: {nearest(base, REGISTRY)}")
    found = REGISTRY[base]
    for extra in extras:
        if extra not in EXTRAS:
            raise UserError(f"method.name = '{name}': '+{extra}' is unknown: {nearest(extra, EXTRAS)}")
        addition = EXTRAS[extra]
        if getattr(addition, "needs_global", False) and not found.has_global:
            raise UserError(f"method.name = '{name}': {base} has no global model that '+{extra}' could start from")
        found = _added(found, addition, extra)
    return found


def _added(base: type[Method], addition: type[Method], extra: str) -> type[Method]:
    docs = f"{(base.__doc__ or '').splitlines()[0]} {(addition.__doc__ or '').splitlines()[0]}"

    class Added(addition, base, abstract=True):  # type: ignore[misc, valid-type, call-arg]
        __doc__ = docs

    Added.name = f"{base.name}+{extra}"
    return Added


def get(name: str, **parameters: Any) -> Method:
    """A method with its hyperparameters, checked."""
    found = method_class(name)
    known = hyperparameters(found)
    for parameter, value in parameters.items():
        if parameter not in known:
            choice = nearest(parameter, known) if known else f"{name} has none"
            raise UserError(f"method.{parameter} = {value!r}: {name} has no such hyperparameter: {choice}")
    try:
        return TypeAdapter(found).validate_python(parameters)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"method.{field} = {first['input']!r}: {first['msg']}") from None


__all__ = ["EXTRAS", "REGISTRY", "Headed", "Method", "field_docs", "get", "hyperparameters", "method_class"]
