"""The recipe section `compare`: methods with their own settings, seeds, newcomers, and how results are presented."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.config.loading import SHORT, assign, flat, section_name
from fedloom.config.recipe import Recipe
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError, shown
from fedloom.core.registry import short
from fedloom.report.sweep import short_names
from fedloom.runs.newcomers import NewcomerSettings
from fedloom.runs.series import Seeds, seed_list

OWN = "with"
"""Key of a method's section that sets recipe fields for this method only."""
OWN_FIELDS = ("training", "objective", "data.views", "data.augment")
"""Fields and sections that methods may set for themselves: not the federation, the network or the evaluation."""

MethodEntry = str | dict[str, Any]


class Comparison(Section):
    """The recipe section `compare`: methods and seeds that share the rest of the recipe."""

    methods: tuple[MethodEntry, ...] = Field(
        ("local", "fedavg"),
        min_length=1,
        description="methods, each a name or a section {name: fedprox, mu: 0.1}; `with` sets fields of training, "
        "objective, data.views or data.augment for this method: {name: repper, with: {training.batch_size: 256}}",
    )
    seeds: Seeds = Field((0,), min_length=1, description="seeds; every method is run with each of them")
    newcomers: NewcomerSettings | None = Field(
        None, description="test the representations on the clients that data.newcomers holds out; default: no such test"
    )
    report: bool = Field(False, description="write the HTML report when all runs are finished")
    about: str | None = Field(None, description="text that is printed above the results")


def read_comparison(
    values: dict[str, Any], methods: Iterable[Any] | None, seeds: Iterable[int] | None, report: bool | None
) -> Comparison:
    """Remove the `compare` section from a recipe's values and return it, overridden by the other arguments."""
    given = values.pop("compare", None) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"compare = {given!r}: must be a section with the fields {', '.join(Comparison.model_fields)}")
    own: dict[str, Any] = {"methods": [values["method"]]} if "method" in values else {}
    own |= {"seeds": [values["seed"]]} if "seed" in values else {}
    chosen = {
        "methods": None if methods is None else list(methods), "seeds": seed_list(seeds), "report": report,
    }  # fmt: skip
    return checked(
        Comparison, own | dict(given) | {name: what for name, what in chosen.items() if what is not None}, "compare"
    )


def recipe_of(values: Mapping[str, Any], method: MethodEntry, seed: int, place: Path) -> Recipe:
    """Return the recipe of one run: the comparison's values, the method, and the fields that it sets for itself.

    Raises:
        UserError: A value is invalid, or the method sets a field that all runs must share.
    """
    found = deepcopy(dict(values)) | {"method": _plain(method), "seed": seed, "out": str(place)}
    for path, value in own_fields(method).items():
        assign(found, path, value)
    return Recipe.parse(found)


def own_fields(method: MethodEntry) -> dict[str, Any]:
    """Return the recipe fields that a method of a comparison sets for itself, by path."""
    given = method.get(OWN, {}) if isinstance(method, Mapping) else {}
    name = section_name(method)
    if not isinstance(given, Mapping):
        raise UserError(
            f"compare.methods: {OWN} = {shown(given)} of '{name}' must be a section, such as {OWN}: "
            "{training.batch_size: 256}"
        )
    fields = {SHORT.get(path, path): value for path, value in flat(given)}
    for path, value in fields.items():
        if not any(path == field or path.startswith(f"{field}.") for field in OWN_FIELDS):
            raise UserError(
                f"compare.methods: {OWN}.{path} = {shown(value)} of '{name}': all runs of a comparison share this "
                f"field; a method may set fields of {', '.join(OWN_FIELDS)}, and its hyperparameters beside its name"
            )
    return fields


def refuse_equal_methods(recipes: list[Recipe], comparison: Comparison) -> None:
    """Raise a UserError if two methods are equal: their runs would be counted as seeds of one."""
    firsts = recipes[:: len(comparison.seeds)]
    found = [(r.method.name, r.make_method(), r.training, r.data, r.make_objective()) for r in firsts]
    for number, settings in enumerate(found):
        if settings in found[:number]:
            raise UserError(
                f"compare.methods: '{settings[0]}' is given twice with the same hyperparameters; remove one of them "
                "(to repeat a method, give several seeds)"
            )


def labels_of(methods: Iterable[MethodEntry]) -> list[str]:
    """Return distinct labels: a method's name, and its settings if the name occurs more than once.

    Raises:
        UserError: Two methods would have the same label, so that their runs would be counted as seeds of one.
    """
    methods = list(methods)
    names = [str(section_name(method)) for method in methods]
    times, files = Counter(names), Counter(map(short, set(names)))
    titles = [short(name) if files[short(name)] == 1 else name for name in names]
    settings = [_settings(method) if times[name] > 1 else {} for method, name in zip(methods, names, strict=True)]
    words = {
        name: short_names({path for own, n in zip(settings, names, strict=True) if n == name for path in own})
        for name in times
    }
    labels = [
        " ".join([title, *(f"{words[name][path]}={value}" for path, value in own.items())])
        for title, name, own in zip(titles, names, settings, strict=True)
    ]
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        raise UserError(
            f"compare.methods: {shown(repeated[0])} describes two methods, whose runs would be counted as seeds of "
            "one; remove one of them, or set it apart by a hyperparameter"
        )
    return labels


def _settings(method: MethodEntry) -> dict[str, Any]:
    """Return a method's hyperparameters by name, and by path the fields that it sets for itself."""
    plain = _plain(method)
    settings = {n: v for n, v in plain.items() if n != "name"} if isinstance(plain, dict) else {}
    return settings | {path.removesuffix(".name"): value for path, value in own_fields(method).items()}


def _plain(method: MethodEntry) -> MethodEntry:
    """Return a method's section without the fields that it sets for itself."""
    return {n: v for n, v in method.items() if n != OWN} if isinstance(method, Mapping) else method
