"""Python objects in place of names, passed to `run`, `compare` and `sweep`: methods, networks, data, and so on.

An object is registered in this process under a name that describes it, such as `object-arrays-1797x64-3f2a9c1b`. The
recipe, which is stored with the run, holds this name: what the object is called, and a hash of its content or source.
To resume the run or to load it in another process, the same object must be passed again.
"""

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config.loading import flat, raw_recipe, read_recipe, section_name
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.method import METHODS, Method
from fedloom.core.registry import OBJECT, note_source, source_name
from fedloom.data import load
from fedloom.data.from_objects import as_dataset, is_data, refuse_arrays
from fedloom.data.sources import SOURCES
from fedloom.experiment.run_folder import stored_values
from fedloom.models import MODELS
from fedloom.runs.registration import register_dataset, register_model, register_optimizer, register_partition


def named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects among recipe fields by names under which they are registered.

    Args:
        fields: Recipe fields as `run` takes them: `method`, `data`, `model`, `partition` and `optimizer` may be
            objects.

    Returns:
        The fields, with names only. An optimizer of torch.optim sets the learning rate.

    Raises:
        UserError: An object cannot be used.
    """
    found = {PATHS.get(name, name): value for name, value in fields.items()}
    if isinstance(fields.get("data"), Mapping) and not fields["data"]:
        raise UserError("data: the mapping is empty; leave it out for the default data, or give each client's samples")
    for name in SECTIONS:
        for field in (name, f"{name}.name"):
            if field in found:
                found[field] = _as_name(name, found[field])
    if callable(found.get("partition")):
        found["partition"] = register_partition(found["partition"])
    optimizer = found.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str):
        found["optimizer"], lr = register_optimizer(optimizer)
        given = next((found[name] for name in ("lr", "training.optimizer.lr") if name in found), None)
        if lr is not None and given not in (None, lr):
            raise UserError(
                f"lr = {given!r}: the optimizer was made with lr = {lr!r}; leave one of them out (fedloom sets the "
                "learning rate of every step, so that schedules apply)"
            )
        if lr is not None:
            found["lr"] = lr
    return found


def read_with_objects(
    recipe: str | Path | Mapping[str, Any] | Recipe | None, fields: Mapping[str, Any], *, trust_code: bool = False
) -> dict[str, Any]:
    """Return the values of a recipe with the fields that `named` has returned.

    Data that were passed as an object and are divided already keep their division, unless the recipe or a field sets
    another one.
    """
    if isinstance(recipe, Recipe):  # it may come from a file: no consent to the Python files that it names
        trusted_code.allow_fields(fields)
        values = raw_recipe(recipe.model_dump(mode="json", exclude_unset=True), fields)
    elif recipe is not None and not isinstance(recipe, str | Path | Mapping):
        raise UserError(
            f"recipe: an object of type {type(recipe).__name__} is not a recipe; give the path of a file, a name or a "
            "mapping, and data as data=…"
        )
    else:
        recipe = _with_names(recipe) if isinstance(recipe, Mapping) else recipe
        values = read_recipe(recipe, fields, trust_code=trust_code)
    name = str(section_name(values.get("data")))
    if name.startswith(OBJECT) and name in SOURCES:
        dataset = load(name)
        section = {"name": name} if isinstance(values["data"], str) else values["data"]
        if dataset.groups is not None and "partition" not in section:
            section = section | {"partition": "natural", "clients": section.get("clients", len(dataset.group_names))}
        if dataset.split is not None:
            section = {"split": dataset.split} | section
        values["data"] = section
    return values


def _with_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects in the sections of a recipe."""
    values = {name: _as_name(name, section) if name in SECTIONS else section for name, section in recipe.items()}
    data = values.get("data")
    if isinstance(data, Mapping) and callable(data.get("partition")):
        values["data"] = {**data, "partition": register_partition(data["partition"])}
    return values


def _as_name(section: str, value: Any) -> Any:
    """Return the name of an object, or of the object that a section names or lists; other values stay as they are."""
    if isinstance(value, Mapping) and not isinstance(value.get("name", ""), str):
        named = _as_name(section, value["name"])
        return {**value, **(named if isinstance(named, Mapping) else {"name": named})}
    if section == "method":
        return method_section(value)
    if section == "model" and isinstance(value, list | tuple):
        return [_as_name(section, one) for one in value]
    if section == "model" and (isinstance(value, nn.Module) or callable(value)):
        return register_model(value)
    if section == "data" and is_data(value):
        return register_dataset(as_dataset(value))
    if section == "data" and isinstance(value, Mapping):
        refuse_arrays(value)
    return str(value) if isinstance(value, Path) else value


SECTIONS = ("method", "model", "data")
"""Sections whose name may be an object."""
PATHS = {"data.partition": "partition", "training.optimizer.name": "optimizer"}
"""Short names of fields that may be objects."""


def register_again(folder: str | Path, objects: Mapping[str, Any]) -> None:
    """Register the objects of a stored run, so that its recipe can be read.

    The weights of a network do not matter here, since they are read from the folder.

    Raises:
        UserError: The run has no object of this kind, or an object cannot be used.
    """
    if unknown := [name for name in objects if name not in ("model", "data", "partition", "optimizer")]:
        raise UserError(f"{unknown[0]}: cannot be given here; give model, data, partition or optimizer")
    values = stored_values(Path(folder)) if objects else {}
    names = named({name: thing for name, thing in objects.items() if name != "model"})
    recorded = dict(flat(values))
    for name, path in (("optimizer", "training.optimizer.name"), ("partition", "data.partition")):
        stored = recorded.get(path)
        if name in objects and names[name] != stored:
            raise UserError(
                f"{name}: it is '{names[name]}', but the run in '{folder}' has {path} = {stored!r}; pass the object "
                "that the run was started with, or leave it out if this is only a name"
            )
    if "model" in objects:
        stored = str(section_name(values.get("model")))
        if not stored.startswith(OBJECT):
            raise UserError(f"model: the run in '{folder}' uses the network '{stored}'; leave the argument out")
        MODELS[stored] = MODELS[register_model(objects["model"])]


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
    note_source(source_name(base.name), base)
    return {"name": kind.name, **options} if options else kind.name
