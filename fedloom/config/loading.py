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
from fedloom.core.errors import UserError, brief, nearest, shown


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
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"recipe '{source}' cannot be read: {reason}; shipped: {nearest(source, known)}") from None
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"recipe '{source}' is not YAML: {error!s:.600}; write it as `fedloom recipe demo` does"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"recipe '{source}' must be a mapping of sections, not {type(values).__name__}")
    return values


LONGEST = 2**20
"""Characters of a recipe, at most."""
MOST = 50_000
"""Values that it may stand for: with aliases, a few lines of YAML can stand for billions."""
DIGITS = 40
"""Of a whole number, at most."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number it is; PyYAML asks for 1.0e-3. Keys must be names or numbers."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A number of thousands of digits is a mistake, and Python refuses to convert it."""
        if len(node.value) > DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(node.value)} digits; {DIGITS} are the most", node.start_mark
            )
        return int(super().construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Fields have names."""
        found = super().construct_mapping(node, deep=deep)
        for key in found:
            if not isinstance(key, str | int):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown(key)} is not the name of a field; write it in quotes", node.start_mark
                )
        return dict(found)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """YAML as recipes are written in.

    Raises:
        yaml.YAMLError: It is not YAML, is too long, or stands for too many values.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it has more than {LONGEST:,} characters")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count(node, {})) > MOST:
            raise yaml.YAMLError(f"with its aliases it stands for {count:.3g} values, and {MOST:,} are the most")
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except Exception as error:  # such as `!!int x`, or a date without such a day
        raise yaml.YAMLError(f"a value cannot be read ({brief(error)})") from None
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for, those behind aliases each time they are named."""
    if id(node) not in known:
        known[id(node)] = MOST  # found again before it is counted: it contains itself
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # fails for half of a character ("\\ud800"), which nothing can print or compare
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


def read_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` → the path and the value, read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")) or not path.isprintable():
        raise UserError(f"--set {shown(text)[1:-1]}: write field=value, for example --set training.rounds=5")
    return path.strip(), _read(f"--set {text}", value)


def read_list(said: str, text: str) -> list[Any]:
    """`a,b,c` → the values, each read as YAML."""
    values: list[Any] = _read(said, f"[{text}]")
    return values


def _read(said: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{said:.200}: the value is not YAML ({problem!s:.200}); write it as in a recipe") from None


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
            raise UserError(
                f"{path:.200} = {shown(value)}: '{'.'.join(sections[:depth]):.200}' is {shown(inner)}, which has no "
                "fields"
            )
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
    trusted_code.allow_fields(fields)
    trusted_code.allow_fields(source if isinstance(source, Mapping) else {})
    values = raw_recipe(source, fields)
    if trust_code:
        trusted_code.trust(values)
    return values


def section_name(section: Any) -> Any:
    """The name in a section, which may be written as the name alone."""
    return section.get("name") if isinstance(section, Mapping) else section
