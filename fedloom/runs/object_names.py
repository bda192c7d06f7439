"""Names of Python objects: what an object is called, and a hash of its source and of the values that it holds.

The names are equal in every process, and differ if a value differs that the object holds: an attribute, an argument of
a partial, a default or a value of its closure.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.errors import UserError, brief
from fedloom.core.registry import OBJECT


def name_of(kind: Any, digest: Any) -> str:
    """Return the name of a function or class, given a hash to which its source and its values are added.

    Raises:
        UserError: It refers to a value that has no description.
    """
    with suppress(OSError, TypeError):  # no source: defined at an interactive prompt
        digest.update(inspect.getsource(kind.func if isinstance(kind, partial) else kind).encode())
    digest.update(json.dumps(described(label(kind), _referred(kind)), sort_keys=True).encode())
    return re.sub(r"[^\w-]", "-", f"{OBJECT}{label(kind)}-{digest.hexdigest()[:8]}")


def label(kind: Any) -> str:
    """Return what a function or class is called."""
    kind = kind.func if isinstance(kind, partial) else kind
    return str(getattr(kind, "__name__", type(kind).__name__)).replace("<lambda>", "lambda")


def described(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON can hold them; arrays and tensors become hashes.

    Raises:
        UserError: A value cannot be described, so that objects which differ in it would get the same name.
    """
    found = {}
    for name, value in values.items():
        try:
            found[name] = _description(value, ())
        except Exception as error:
            raise UserError(
                f"{owner}: the value '{name}', a {type(value).__name__}, cannot be compared with that of another "
                f"object ({brief(error)}); hold numbers, texts, arrays or tensors instead"
            ) from error
    return found


def add_module(digest: Any, module: nn.Module) -> None:
    """Add a network to a hash: its weights, its layers and their attributes."""
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    for path, part in module.named_modules():
        for name, value in sorted(vars(part).items()):
            if name.startswith("_") or isinstance(value, Tensor | nn.Module):
                continue
            try:
                text = json.dumps(_description(value, ()), sort_keys=True)
            except Exception:  # a network may hold anything, such as a lock; its weights are part of the name already
                text = type(value).__name__
            digest.update(f"{path} {type(part).__qualname__} {name} {text}".encode())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().data


def _referred(kind: Any) -> dict[str, Any]:
    """Return the values that a function or class refers to: arguments of a partial, defaults, closure, globals."""
    if isinstance(kind, partial):
        bound = {str(i): value for i, value in enumerate(kind.args)} | kind.keywords
        return _referred(kind.func) | {f"={name}": value for name, value in bound.items()}
    if inspect.ismethod(kind):
        return _referred(kind.__func__) | {"=self": kind.__self__}
    if inspect.isclass(kind):
        functions = {name: value for name, value in vars(kind).items() if inspect.isfunction(value)}
        return {f"{name}.{n}": v for name, function in functions.items() for n, v in _referred(function).items()}
    if not inspect.isfunction(kind):
        return {}
    cells = dict(zip(kind.__code__.co_freevars, kind.__closure__ or (), strict=True))
    used = {name: kind.__globals__.get(name) for name in kind.__code__.co_names}
    values = {name: value for name, value in used.items() if _plain(value) or isinstance(value, _ARRAYS)}
    for name, cell in cells.items():
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return (
        values
        | {f"default {i}": value for i, value in enumerate(kind.__defaults__ or ())}
        | (kind.__kwdefaults__ or {})
    )


_ARRAYS = (np.generic, np.ndarray, Tensor)


def _description(value: Any, outer: tuple[int, ...]) -> Any:
    """Return a value as JSON can hold it. `outer` has the ids of the objects that hold the value."""
    if _plain(value):
        return value
    if id(value) in outer:
        return f"outer {outer.index(id(value))}"
    outer = (*outer, id(value))

    def inner(values: Any) -> list[Any]:
        return [_description(one, outer) for one in values]

    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
        return [str(value.dtype), repr(value) if isinstance(value, np.generic) else inner(value.tolist())]
    if isinstance(value, np.ndarray | Tensor):
        data = _bytes(value) if isinstance(value, Tensor) else value.tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, list | tuple):
        return inner(value)
    if isinstance(value, dict | set | frozenset):
        entries = value.items() if isinstance(value, dict) else value
        return sorted(inner(entries), key=lambda entry: json.dumps(entry, sort_keys=True))
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, partial) or inspect.isroutine(value) or inspect.isclass(value):
        source = ""
        with suppress(OSError, TypeError):
            source = inspect.getsource(value)
        title = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', label(value))}"
        foreign = inspect.isclass(value) and not source
        return [title, source, [] if foreign else inner(sorted(_referred(value).items(), key=lambda item: item[0]))]
    reduced = value.__reduce_ex__(2)  # as pickle sees the object; raises for locks, files and the like
    if isinstance(reduced, str):
        return reduced
    return inner([type(value).__qualname__, *(list(part) if hasattr(part, "__next__") else part for part in reduced)])


def _plain(value: Any) -> bool:
    """Return whether a value has the same JSON text in every process."""
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
