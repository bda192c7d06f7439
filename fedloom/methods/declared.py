"""A method's hyperparameters, as its class declares and explains them."""

import ast
import inspect
import textwrap
from dataclasses import fields
from itertools import pairwise
from typing import Any

from fedloom.methods.base import Method


def hyperparameters(method: type[Method]) -> dict[str, Any]:
    """Names and defaults."""
    return {f.name: f.default for f in fields(method)}


def field_docs(method: type[Method]) -> dict[str, str]:
    """The string below each hyperparameter in the source, by name."""
    found: dict[str, str] = {}
    for cls in reversed(method.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError):  # made at run time, or built in
            continue
        assert isinstance(body, ast.ClassDef)
        for field, doc in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                found[field.target.id] = str(ast.literal_eval(doc.value))
    return found
