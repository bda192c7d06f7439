"""Recipes before validation: YAML files, shipped recipes by name, single fields set by path."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from fedloom.core import trusted_code
from fedloom.core.errors import UserError, nearest


def shipped() -> dict[str, Traversable]:
    """Recipes that come with the package, by name: `demo`, `sweeps/fedintr-mu`, and each paper's common setting.

    The other files in a paper's folder are its tables (`fedloom.studies`).
    """
    return dict(sorted(_recipes(files("fedloom") / "studies" / "recipes")))


def _recipes(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    entries = list(folder.iterdir())
    for entry in [e for e in entries if e.name == "setting.yaml"] or entries:
        if entry.is_dir():
            yield from _recipes(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry


def read_yaml(source: str | Path) -> dict[str, Any]:
    """A recipe's raw values."""
    path: Path | Traversable = Path(source)
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        path = known[str(source)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"recipe '{source}' cannot be read: {reason}; shipped: {nearest(source, known)}") from None
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"recipe '{source}' is not YAML: {error}") from None
    except RecursionError:
        raise UserError(f"recipe '{source}' is not YAML that can be read: it is nested too deeply") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe '{source}' must be a mapping of sections, not {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number it is; PyYAML asks for 1.0e-3."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """YAML as recipes are written in."""
    return yaml.load(text, Loader=_Loader)


def read_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` → the path and the value, read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise UserError(f"--set {text}: write field=value, for example --set training.rounds=5")
    return path.strip(), _read(f"--set {text}", value)


def read_list(said: str, text: str) -> list[Any]:
    """`a,b,c` → the values, each read as YAML."""
    values: list[Any] = _read(said, f"[{text}]")
    return values


def _read(said: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UserError(f"{said}: the value is not YAML ({problem}); write it as in a recipe") from None
    except RecursionError:
        raise UserError(f"{said.partition('=')[0]}: the value is nested too deeply; write it as in a recipe") from None


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets `a.b.c` in nested mappings."""
    *sections, last = path.split(".")
    for depth, section in enumerate(sections, 1):
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        elif isinstance(inner, str):  # the short form, `method: fedavg`
            inner = values[section] = {"name": inner}
        if not isinstance(inner, dict):
            raise UserError(f"{path} = {value!r}: '{'.'.join(sections[:depth])}' is {inner!r}, which has no fields")
        values = inner
    values[last] = value


SHORT = {
    "method": "method.name",
    "data": "data.name",
    "data_dir": "data.dir",
    "clients": "data.clients",
    "partition": "data.partition",
    "model": "model.name",
    "rounds": "training.rounds",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "lr": "training.optimizer.lr",
    "fraction": "training.fraction",
    "seed": "seed",
    "engine": "engine.name",
    "ray_address": "engine.address",
    "out": "out",
}
"""Short names of the fields that are set most often."""


def raw_recipe(source: str | Path | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values before they are checked: a file, a shipped name or a mapping, then single fields over it.

    Fields go by their short name (`rounds`) or their path (`training.rounds`). Another `method` or `model` takes
    nothing of the settings of the one that it replaces.
    """
    values = deepcopy(dict(source)) if isinstance(source, Mapping) else read_yaml(source) if source is not None else {}
    for name, value in fields.items():
        if name in ("method", "model") and section_name(values.get(name)) != value:
            values[name] = deepcopy(value)
        else:
            assign(values, SHORT.get(name, name), str(value) if isinstance(value, Path) else value)
    return values


def read_recipe(
    source: str | Path | Mapping[str, Any] | None, fields: Mapping[str, Any], *, trust_code: bool = False
) -> dict[str, Any]:
    """Reads `raw_recipe` for a public function, whose arguments allow the Python files that they name.

    Files that only the recipe file names are allowed with `trust_code`.
    """
    trusted_code.allow(fields, source if isinstance(source, Mapping) else None)
    values = raw_recipe(source, fields)
    if trust_code:
        trusted_code.trust(values)
    return values


def section_name(section: Any) -> Any:
    """The name in a section, which may be written as the name alone."""
    return section.get("name") if isinstance(section, Mapping) else section
