"""The code that computed a result, and whether it differs from the present one.

Source files are read, never imported: showing results neither runs a user's code nor needs torch.
"""

import ast
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedloom.core.registry import file_of, split
from fedloom.core.trusted_code import named_files
from fedloom.studies.comparison import Line
from fedloom.studies.results import CellResult

PACKAGE = Path(__file__).parent.parent
FOLLOWED = ("methods", "losses")
"""Packages of fedloom whose files belong to a method. A change of the others is noticed by fedloom's version."""
VERSION = "fedloom"
"""Key of fedloom's version in a fingerprint; the other keys are names of files."""
_CLASS = re.compile(r"^class (\w+)\((.*)\):$", re.MULTILINE)
_ADDON = re.compile(r'addon="(\w+)"')


def fingerprint(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the version of fedloom and a hash of each source file of a recipe's method.

    These are the method's file, the users' files that the recipe names, and the files that these import from
    `fedloom.methods`, `fedloom.losses` and the users' folders.

    Args:
        values: The recipe, before validation.
    """
    base, addons = split(values["method"]["name"])
    shipped = [] if file_of(base) else [base.lower()]
    named = [
        path for name in (*shipped, *(f"+{addon.lower()}" for addon in addons)) for path in _shipped().get(name, ())
    ]
    hashes: dict[str, str] = {}
    for path in sorted(_with_imports([*named, *named_files(values)])):
        is_ours = path.is_relative_to(PACKAGE)
        name = path.relative_to(PACKAGE).as_posix() if is_ours else path.name
        hashes[name] = hashlib.sha256((hashes.get(name, "").encode()) + path.read_bytes()).hexdigest()[:16]
    try:
        return {VERSION: version("fedloom"), **hashes}
    except PackageNotFoundError:  # a checkout that is not installed
        return hashes


def outdated(line: Line) -> list[str]:
    """Return in words what has changed since the results of a line were computed; empty if nothing is known to have.

    Results of versions that stored no fingerprint, and files that are not there now, cannot be compared.
    """
    return list(dict.fromkeys(words for _, changes in _changes(line) for words in changes))


def note(lines: Sequence[Line], extra: Sequence[str] = ()) -> list[str]:
    """Return a sentence on the outdated lines of a column, and the commands that compute them again; empty without.

    Args:
        lines: Lines of one column.
        extra: Further arguments of the commands.
    """
    changes = {line.cell.name: words for line in lines if (words := outdated(line))}
    if not changes:
        return []
    which = "; ".join(f"{name} ({', '.join(words)})" for name, words in changes.items())
    return [f"computed by other code than the present: {which}; to compute again:", *_commands(lines, extra)]


def _commands(lines: Iterable[Line], extra: Sequence[str]) -> list[str]:
    """Return the commands that compute outdated results of a column again: one for each seed and change."""
    from fedloom.studies.report import command, flags  # imports torch

    found: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        *start, method = command(line.cell)
        trust = ["--trust-code"] * any(True for _ in named_files(line.cell.values))
        for result, _ in _changes(line):
            rest = (*flags(result.changes, line.cell), "--seed", str(result.seed), *extra, "--again", *trust)
            found.setdefault((*start, "", *rest), []).append(method)
    return [shlex.join([part or ",".join(methods) for part in parts]) for parts, methods in found.items()]


def _changes(line: Line) -> list[tuple[CellResult, list[str]]]:
    """Return the outdated results of a line, each with what has changed since it was computed."""
    if not any(result.code for result in line.results):
        return []
    now = fingerprint(line.cell.values)
    found = []
    for result in line.results:
        differs = [name for name, old in result.code.items() if name in now and now[name] != old]
        words = [f"by fedloom {result.code[VERSION]}" if name == VERSION else f"{name} changed" for name in differs]
        found += [(result, words)] if words else []
    return found


@cache
def _shipped() -> dict[str, list[Path]]:
    """Return the files of fedloom's methods by name, and of add-ons by `+` and name."""
    found: dict[str, list[Path]] = {}
    for path in (PACKAGE / "methods").rglob("*.py"):
        for name, bases in _CLASS.findall(path.read_text(encoding="utf-8")):
            addon = _ADDON.search(bases)
            found.setdefault(f"+{addon[1]}" if addon else name.lower(), []).append(path)
    return found


def _with_imports(paths: Iterable[Path]) -> set[Path]:
    """Return files and all files that they import, directly or not."""
    found: set[Path] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_by(path)
    return found


@cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """Return the files that a file imports: of the packages that are followed, and neighbours of a user's file."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # the error is reported when the file is imported
        return ()
    found: list[Path] = []
    pairs = [(node.module, name.name) for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    pairs += [(name.name, "") for node in nodes if isinstance(node, ast.Import) for name in node.names]
    for module, name in pairs:
        parts = (module or "").split(".")
        if parts[0] == "fedloom" and parts[1:2] and parts[1] in FOLLOWED:
            found += _defining(PACKAGE.joinpath(*parts[1:]), name)
        elif not path.is_relative_to(PACKAGE):
            found += _module(path.parent / parts[0])
    return tuple(found)


def _module(place: Path) -> Iterator[Path]:
    """Yield the file of a module: `place.py`, or the `__init__.py` of the folder `place`."""
    yield from (file for file in (place.with_name(f"{place.name}.py"), place / "__init__.py") if file.is_file())


def _defining(place: Path, name: str) -> Iterator[Path]:
    """Yield the file that `from place import name` gets a name from: a package's `__init__` mostly passes names on."""
    if name and (inner := list(_module(place / name))):
        yield from inner
        return
    for file in _module(place):
        for node in ast.parse(file.read_bytes()).body if file.name == "__init__.py" else ():
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                yield from _module(PACKAGE.joinpath(*(node.module or "").split(".")[1:]))
                return
        yield file
