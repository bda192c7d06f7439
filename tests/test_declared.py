"""Every package that is imported is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUNDLED = {"pydantic_core": "pydantic", "triton": "torch"}
"""Packages that another one pins exactly and exposes as its own."""


def imported(folder: str) -> dict[str, set[str]]:
    """Top-level modules that the folder's files import, apart from Python's and the project's own, with those files."""
    found: dict[str, set[str]] = {}
    paths = sorted((ROOT / folder).rglob("*.py"))
    own = {"fedloom", "benchmarks", "tests"} | ({path.stem for path in paths} if folder == "tests" else set())
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - own:
                found.setdefault(top, set()).add(str(path.relative_to(ROOT)))
    return found


def undeclared(folder: str, requirements: Iterable[str]) -> dict[str, set[str]]:
    declared = {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}
    installed = packages_distributions()

    def known(module: str) -> bool:
        names = [BUNDLED.get(module, module), *installed.get(module, ())]
        return not declared.isdisjoint(map(canonical, names))

    return {module: files for module, files in imported(folder).items() if not known(module)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_the_package_imports_is_declared():
    extras = [needed for name, needed in PROJECT["optional-dependencies"].items() if name != "dev"]
    assert undeclared("fedloom", chain(PROJECT["dependencies"], *extras)) == {}


def test_what_the_tests_import_is_declared():
    assert undeclared("tests", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]) == {}


def test_deploying_needs_the_extra_flower_alone():
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["flower"]]
    assert undeclared("fedloom/deploy", needed) == {}


def test_every_file_of_the_package_is_in_the_wheel():
    package = ROOT / "fedloom"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fedloom"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in package.rglob("*.*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files - packed if path.suffix != ".py"} == set()
    modules = {path for path in files if path.suffix == ".py"}
    assert {path for path in modules if not (path.parent / "__init__.py").is_file()} == set()


def test_extras_that_errors_and_pages_name_exist():
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "fedloom").rglob("*.py")]
    named = {extra for path in paths for extra in re.findall(r"fedloom\[([a-z0-9]+)\]", path.read_text("utf-8"))}
    assert named - set(PROJECT["optional-dependencies"]) == set()
    assert named >= set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
