"""constraints.txt pins every package that `make` installs."""

import re
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
NOT_PINNED = {"fedloom", "pip", "setuptools", "wheel", "uv"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, set[str]]:
    """Return the pinned versions by package; markers may give a package several."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                found.setdefault(canonical(pin.name), set()).add(str(pin.specifier).removeprefix("=="))
    return found


def test_every_requirement_is_pinned_to_a_version_that_satisfies_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    found = pins()
    for requirement in map(Requirement, [*project["dependencies"], *(line for extra in extras for line in extra)]):
        if requirement.name == "fedloom":  # an extra that includes another
            continue
        versions = found[canonical(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.skipif(Path(sys.prefix).parent != ROOT, reason="needs an environment that make has made")
def test_what_is_installed_is_what_is_pinned():
    found = pins()
    installed = {canonical(package.name): package.version.partition("+")[0] for package in distributions()}
    wrong = {
        name: version for name, version in installed.items() if name not in NOT_PINNED and version not in found[name]
    }
    assert wrong == {}
