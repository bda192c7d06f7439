"""Recipes before validation: reading YAML files and shipped recipes, setting single fields by path."""

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

FREE = (
    "engine",
    "storage",
    "out",
    "log",
    "data.dir",
    "sweep.parallel",
    "compare.newcomers",
    "compare.report",
    "compare.about",
)
"""Fields that may change when a run is resumed: they affect where and how fast it runs, not its results."""


def shipped() -> dict[str, Traversable]:
    """Return the recipe files that come with the package, by name (`demo`, `sweeps/fedintr-mu`).

    A paper's folder contributes only its common setting, `setting.yaml`; the other files in it define the paper's
    tables (`fedloom.studies`).
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
    """Read a recipe file without validating it.

    Args:
        source: Path of a YAML file, or the name of a shipped recipe (`demo`). An existing file takes precedence.

    Returns:
        The values of the file, section by section.

    Raises:
        UserError: The file cannot be read, is not YAML, or is not a mapping.
    """
    path: Path | Traversable = Path(source)
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        path = known[str(source)]
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"recipe '{source}' cannot be read: {reason}; {nearest(source, known)}, or a file") from None
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"recipe '{source}' is not YAML: {error!s:.600}; write it as `fedloom recipe demo` does"
        ) from None
    if values is None:
        raise UserError(
            f"recipe '{source}' is empty: write a mapping of sections, such as `method: fedavg` and below it "
            "`data: {name: digits, clients: 10}`; `fedloom recipe demo` prints a whole recipe"
        )
    if not isinstance(values, dict):
        raise UserError(f"recipe '{source}' must be a mapping of sections, not {type(values).__name__}")
    return values


LONGEST = 2**20
"""Maximum number of characters in a recipe file."""
MOST = 50_000
"""Maximum number of values after YAML aliases are expanded: a few lines with aliases can expand to billions."""
DIGITS = 40
"""Maximum number of digits of an integer."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reads `1e-3` as a number (PyYAML requires `1.0e-3`) and checks mapping keys."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer of at most `DIGITS` digits: Python refuses to convert text with thousands of digits."""
        if len(node.value) > DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number has {len(node.value)} digits, the maximum is {DIGITS}", node.start_mark
            )
        return int(super().construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Read a mapping whose keys are strings or integers, each once."""
        written: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in written:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {shown(key.value)} is there twice; remove one of them", key.start_mark
                    )
                written.add(key.value)
        found = super().construct_mapping(node, deep=deep)
        for key in found:
            if not isinstance(key, str | int):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown(key)} is not a field name; write it in quotes", node.start_mark
                )
        return dict(found)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse YAML text with the limits that apply to recipes.

    Raises:
        yaml.YAMLError: The text is not YAML, is too long, or expands to too many values.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"the text has more than {LONGEST:,} characters")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count(node, {})) > MOST:
            raise yaml.YAMLError(f"its aliases expand to {count:.3g} values, the maximum is {MOST:,}")
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("the text is nested too deeply") from None
    except Exception as error:  # for example `!!int x`, or a date that does not exist
        raise yaml.YAMLError(f"a value cannot be read ({brief(error)})") from None
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values that a node expands to; an aliased node counts once per use."""
    if id(node) not in known:
        known[id(node)] = MOST  # read only if the node contains itself: then the total exceeds the maximum
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # raises for a lone surrogate ("\\ud800"), which cannot be printed
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


def read_assignment(text: str) -> tuple[str, Any]:
    """Split `a.b=c` into the path and the value, which is parsed as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")) or not path.isprintable():
        raise UserError(f"--set {shown(text)[1:-1]}: write field=value, for example --set training.rounds=5")
    return path.strip(), _read(f"--set {text}", value)


def read_list(source: str, text: str) -> list[Any]:
    """Split `a,b,c` into values, each parsed as YAML; error messages begin with `source`, the flag as typed."""
    values: list[Any] = _read(source, f"[{text}]")
    return values


def _read(source: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{source:.200}: the value is not YAML ({problem!s:.200}); write it as in a recipe") from None


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at path `a.b.c` of nested mappings, in place.

    Missing sections are created, and a section in short form (`method: fedavg`) is expanded.

    Raises:
        UserError: A value on the path is not a section.
    """
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
    "optimizer": "training.optimizer.name",
    "fraction": "training.fraction",
    "seed": "seed",
    "engine": "engine.name",
    "ray_address": "engine.address",
    "out": "out",
}
"""Paths of the most frequently set fields, by short name."""
REPLACED = ("method", "model", "objective")
"""Sections whose options belong to the name in them."""
ELSEWHERE = {
    "algo": "method", "algorithm": "method", "strategy": "method", "dataset": "data", "num_clients": "clients",
    "n_clients": "clients", "nc": "clients", "network": "model", "global_rounds": "rounds", "num_rounds": "rounds",
    "gr": "rounds", "local_epochs": "epochs", "ls": "epochs", "batch": "batch_size", "bs": "batch_size",
    "lbs": "batch_size", "learning_rate": "lr", "local_learning_rate": "lr", "join_ratio": "fraction",
    "jr": "fraction", "output": "out",
}  # fmt: skip
"""Short names of fields, by their names in other libraries, such as PFLlib's flags."""


def raw_recipe(source: str | Path | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read a recipe and set single fields in it, without validating the result.

    Args:
        source: Path of a YAML file, the name of a shipped recipe, a mapping of values, or None for an empty recipe.
        fields: Values by short name (`rounds`) or path (`training.rounds`). A `method`, `model` or `objective` that
            differs from the recipe's replaces the whole section, options included. Of other sections
            (`training={"epochs": 2}`), only the given fields are set. Single fields take precedence over sections.
    """
    values = deepcopy(dict(source)) if isinstance(source, Mapping) else read_yaml(source) if source is not None else {}
    # sections that may be replaced as a whole come first, then mappings, then single fields
    for name, value in sorted(fields.items(), key=lambda f: (f[0] not in REPLACED, not isinstance(f[1], Mapping))):
        if name in REPLACED and section_name(values.get(name)) != section_name(value):
            values[name] = deepcopy(value)
        elif isinstance(value, Mapping):
            path = SHORT.get(name, name).removesuffix(".name")
            assign(values, path, _merged(_at(values, path), value))
        else:
            assign(values, SHORT.get(name, name), str(value) if isinstance(value, Path) else value)
    return values


def _at(values: Any, path: str) -> Any:
    """Return the value at a path of nested mappings; None if there is none."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _merged(section: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with these fields set, in the sections inside of it, too."""
    section = {"name": section} if isinstance(section, str) else dict(section or {})
    for name, value in fields.items():
        section[name] = _merged(section.get(name), value) if isinstance(value, Mapping) else deepcopy(value)
    return section


def read_recipe(
    source: str | Path | Mapping[str, Any] | None, fields: Mapping[str, Any], *, trust_code: bool = False
) -> dict[str, Any]:
    """Return `raw_recipe`, called with arguments that come from the user, and record consent to import Python files.

    Files that the arguments name may be imported. Files that only the recipe file names may be imported if
    `trust_code` is set.
    """
    trusted_code.allow_fields(fields)
    trusted_code.allow_fields(source if isinstance(source, Mapping) else {})
    values = raw_recipe(source, fields)
    if trust_code:
        trusted_code.trust(values)
    return values


def section_name(section: Any) -> Any:
    """Return the name in a section, which is either a mapping or, in short form, the name itself."""
    return section.get("name") if isinstance(section, Mapping) else section


def is_free(path: str) -> bool:
    """Return whether a field may change when a run is resumed."""
    return any(path == part or path.startswith(part + ".") for part in FREE)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a recipe's fields as (path, value)."""
    if not isinstance(values, Mapping):
        yield prefix, list(values) if isinstance(values, tuple) else values
        return
    for name, value in values.items():
        yield from flat(value, f"{prefix}.{name}".lstrip("."))
