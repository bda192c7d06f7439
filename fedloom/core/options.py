"""Options of whatever a recipe names: fields of methods and objectives, arguments of networks, values of partitions.

Options are declared by annotations and defaults in the source, and validated by `validated`.
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
"""An integer of at least 1: units, channels, epochs."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""
Share = Annotated[float, Field(ge=0, lt=1)]
"""A number in [0, 1), such as a dropout probability."""

Declaration = dict[str, tuple[Any, Any]]
"""Annotation and default of each option by name; the default is `...` for required options."""


def declared(thing: Callable[..., Any]) -> Declaration:
    """Return the options of a dataclass (its fields), or of a function or class (its keyword-only parameters)."""
    if is_dataclass(thing):
        hints = get_type_hints(thing, include_extras=True)
        return {f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(thing)}
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.kind is p.KEYWORD_ONLY]
    source: Any = getattr(thing, "__init__") if isinstance(thing, type) else thing  # noqa: B009
    hints = get_type_hints(source, include_extras=True)
    return {p.name: option(hints.get(p.name, Any), p.default) for p in parameters}


def option(hint: Any, default: Any) -> tuple[Any, Any]:
    """Return the annotation and default of one parameter; without an annotation, the type of a simple default."""
    if default is inspect.Parameter.empty:
        return hint, ...
    return (type(default) if hint is Any and isinstance(default, int | float | str) else hint), default


def validated(declaration: Declaration, values: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
    """Validate and convert option values.

    Args:
        declaration: The options, as returned by `declared`.
        values: The values of a recipe.
        path: The recipe section, for error messages.
        owner: Whose options these are, for error messages.

    Raises:
        UserError: An option is unknown or its value is invalid.
    """
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
    """Return the names and defaults of the options."""
    return {name: default for name, (_, default) in declared(thing).items()}


def field_docs(thing: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases, by field name."""
    found: dict[str, str] = {}
    for cls in reversed(thing.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError):  # created at run time, or a builtin: there is no source
            continue
        assert isinstance(body, ast.ClassDef)
        for field, doc in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                found[field.target.id] = str(ast.literal_eval(doc.value))
    return found
