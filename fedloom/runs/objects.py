"""Python objects in place of names: methods, networks and data that are passed to `run`, `compare` and `sweep`.

An object is registered in this process under a name that describes it, such as `object-arrays-1797x64-3f2a9c1b`. The
recipe, which is stored with the run, holds this name. To resume the run or to load its data in another process, the
same object must be passed again.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any

import torch
from torch import nn

from fedloom.core.errors import UserError
from fedloom.core.method import METHODS, Method
from fedloom.core.task import Dataset
from fedloom.data.from_arrays import as_dataset
from fedloom.data.sources import SOURCES
from fedloom.models import MODELS

PREFIX = "object-"
"""Beginning of the names of objects."""


def named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects among recipe fields by names under which they are registered.

    Args:
        fields: Recipe fields as `run` takes them: `method`, `data` and `model` may be objects.

    Returns:
        The fields, with names only. Data that are divided among clients already set the partition `natural`.

    Raises:
        UserError: An object cannot be used.
    """
    found = dict(fields)
    if "method" in found:
        found["method"] = method_section(found["method"])
    if isinstance(found.get("model"), nn.Module) or callable(found.get("model")):
        found["model"] = register_model(found["model"])
    if ("data" in found and not isinstance(found["data"], str | Mapping)) or _is_clients(found.get("data")):
        dataset = as_dataset(found["data"])
        found["data"] = register_dataset(dataset)
        if dataset.groups is not None:
            found.setdefault("partition", "natural")
    return found


def method_section(method: Any) -> Any:
    """Return the recipe section of a method that is given as a class or an instance; names stay as they are.

    Raises:
        UserError: Another method with the name of this class is registered.
    """
    if isinstance(method, type) and issubclass(method, Method):
        kind, options = method, {}
    elif isinstance(method, Method):
        kind = type(method)
        options = {field.name: getattr(method, field.name) for field in dataclass_fields(method)}
    else:
        return method
    base = kind.plain
    if METHODS.get(base.name) is not base:
        raise UserError(f"method: another class named '{base.__name__}' is registered; rename one of them")
    return {"name": kind.name, **options} if options else kind.name


def register_dataset(dataset: Dataset) -> str:
    """Register a dataset in this process and return its name."""
    digest = hashlib.sha256()
    for tensor in (dataset.images, dataset.labels, dataset.test, dataset.groups):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().data)
    digest.update(repr((dataset.classes, dataset.group_names)).encode())
    shape = "x".join(map(str, dataset.images.shape))
    name = re.sub(r"[^\w-]", "-", f"{PREFIX}{dataset.name}-{shape}-{digest.hexdigest()[:8]}")

    def load() -> Dataset:
        return dataset

    SOURCES[name] = load
    return name


def register_model(model: Any) -> str:
    """Register a network in this process and return its name.

    Args:
        model: An `nn.Module`, which also gives the initial weights; a class of modules; or a function that returns one.
    """
    digest = hashlib.sha256()
    if isinstance(model, nn.Module):
        kind, make = type(model), partial(deepcopy, model)
        for name, tensor in model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    else:
        kind = make = model
    with suppress(OSError, TypeError):  # no source: defined at an interactive prompt
        digest.update(inspect.getsource(kind).encode())
    label = getattr(kind, "__name__", type(kind).__name__)
    name = re.sub(r"[^\w-]", "-", f"{PREFIX}{label}-{digest.hexdigest()[:8]}")
    MODELS[name] = _without_arguments(make) if isinstance(model, nn.Module) else make
    return name


def _without_arguments(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def copy_of_the_module() -> nn.Module:
        return make()

    return copy_of_the_module


def _is_clients(data: Any) -> bool:
    """Return whether a mapping holds pairs of arrays per client, rather than a recipe section."""
    return isinstance(data, Mapping) and bool(data) and all(isinstance(value, tuple) for value in data.values())
