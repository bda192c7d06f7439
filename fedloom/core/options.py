"""Options of what a recipe names: a method's or objective's fields, a network's keywords, a partition's values.

All of them are declared by annotations and defaults in the source, and validated by one function.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from fedloom.core.checking import checked
from fedloom.core.errors import UserError, nearest

Count = Annotated[int, Field(ge=1)]
"""A whole number of at least 1: units, channels, epochs."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""
Share = Annotated[float, Field(ge=0, lt=1)]
"""A number in [0, 1): a probability such as dropout."""

Declaration = dict[str, tuple[Any, Any]]
"""By name: the annotation, and the default (`...` where there is none)."""


def declared(thing: Callable[..., Any]) -> Declaration:
    """The options of a dataclass (its fields), or of a function or class (its keyword-only parameters)."""
    if is_dataclass(thing):
        hints = get_type_hints(thing, include_extras=True)
        return {f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(thing)}
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.kind is p.KEYWORD_ONLY]
    source: Any = getattr(thing, "__init__") if isinstance(thing, type) else thing  # noqa: B009
    hints = get_type_hints(source, include_extras=True)
    return {p.name: _option(hints.get(p.name, Any), p.default) for p in parameters}


def _option(hint: Any, default: Any) -> tuple[Any, Any]:
    if default is inspect.Parameter.empty:
        return hint, ...
    return (type(default) if hint is Any and isinstance(default, int | float | str) else hint), default


def validated(declaration: Declaration, values: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
    """Values checked and converted, or a UserError that names the recipe section (`path`) and the `owner`."""
    for name, value in values.items():
        if name not in declaration:
            choice = nearest(name, declaration) if declaration else f"{owner} has none"
            raise UserError(f"{path}.{name} = {value!r}: {owner} has no such option: {choice}")
    if not values:
        return {}  # making a model takes 2 ms, and a recipe has about seven sections without options
    used: Any = {name: declaration[name] for name in values}
    model: type[BaseModel] = create_model("Options", __config__=ConfigDict(extra="forbid"), **used)
    read = checked(model, dict(values), path)
    return {name: getattr(read, name) for name in values}


def hyperparameters(thing: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults."""
    return {name: default for name, (_, default) in declared(thing).items()}


def field_docs(thing: type) -> dict[str, str]:
    """The string below each field in the source of a class and its bases, by name."""
    found: dict[str, str] = {}
    for cls in reversed(thing.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError):  # made at run time, or built in
            continue
        assert isinstance(body, ast.ClassDef)
        for field, doc in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                found[field.target.id] = str(ast.literal_eval(doc.value))
    return found
