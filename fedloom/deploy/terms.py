"""Terms that all parties must share: recipe, classes, image shape and code. Imports no torch: servers start fast."""

import ast
import hashlib
import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from fedloom.config.loading import read_yaml
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError
from fedloom.deploy.versions import same_version
from fedloom.experiment.files import write_whole

if TYPE_CHECKING:
    from fedloom.config.recipe import Recipe

PROTOCOL = 2
"""Version of the message protocol; parties with different versions do not work together."""
EACH_DECIDES = ("engine", "storage", "out")
"""Recipe sections that each party decides for itself."""
OF_THE_DATA = ("split", "augment", "views", "normalise", "seed")
"""Fields of `data` that all parties share; each client decides for itself which images it has."""


class FederationTerms(Section):
    """Content of `federation.yaml`, which is the same file for all parties: addresses, organisations, images."""

    name: str = Field(description="name of the federation")
    host: str = Field(description="name or address of the server, as organisations reach it")
    port: int = Field(9092, ge=1, le=65535, description="port that organisations connect to")
    control_port: int = Field(9093, ge=1, le=65535, description="port for control, on the server's machine")
    organisations: tuple[str, ...] = Field(min_length=1, description="names; the order defines client numbers from 0")
    revoked: tuple[str, ...] = Field((), description="organisations that were revoked; they keep their numbers")
    classes: tuple[str, ...] = Field(min_length=1, description="names of the classes; the order defines the labels")
    shape: tuple[int, int, int] = Field(description="channels, height and width of an image")

    @classmethod
    def load(cls, folder: Path) -> "FederationTerms":
        """Load the terms from a folder that `fedloom deploy init` created.

        Raises:
            UserError: If the folder has no valid federation.yaml.
        """
        path = folder / "federation.yaml"
        if not path.is_file():
            raise UserError(
                f"'{folder}' has no federation.yaml: give a folder that `fedloom deploy init` created (server, or "
                "organisations/NAME)"
            )
        return checked(cls, read_yaml(path))

    def number(self, organisation: str) -> int:
        """Return the client number of an organisation."""
        if organisation not in self.organisations:
            known = ", ".join(self.organisations)
            raise UserError(f"'{organisation}' is not one of the federation's organisations ({known})")
        return self.organisations.index(organisation)

    def save(self, folder: Path) -> None:
        """Write the terms to a folder."""
        values = self.model_dump(mode="json", exclude=set() if self.revoked else {"revoked"})
        write_whole(folder / "federation.yaml", yaml.safe_dump(values, sort_keys=False).encode())

    def with_organisations(self, names: Any) -> "FederationTerms":
        """Return these terms with the organisations of a run, as the server states them.

        Organisations are only added at the end, so one of both lists begins with the other. Numbers do not change.

        Raises:
            UserError: If the names are not such a list.
        """
        mine = self.organisations
        valid = isinstance(names, list) and names and all(map(is_organisation, names))
        if (
            not valid
            or len(set(names)) < len(names)
            or any(ours != theirs for ours, theirs in zip(mine, names, strict=False))
        ):
            raise UserError(
                f"organisations = {names!r:.100} at the server, and {', '.join(mine)} here: neither list begins with "
                "the other; ask the server for the current federation.yaml"
            )
        return self.model_copy(update={"organisations": tuple(names)})


def is_organisation(name: object) -> bool:
    """Whether a value is a valid name of an organisation; files have this name, too."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]{0,60}", name) is not None


def is_run(name: object) -> bool:
    """Whether a value is a valid run name; each party creates a folder of this name."""
    return isinstance(name, str) and re.fullmatch(r"[\w+-][\w.+-]{0,99}", name) is not None


def fingerprint(recipe: "Recipe", federation: FederationTerms) -> str:
    """Return a hash of all settings that must be the same for all parties."""
    values: dict[str, Any] = {k: v for k, v in recipe.resolved().items() if k not in EACH_DECIDES}
    values["data"] = {name: values["data"][name] for name in OF_THE_DATA}
    values["federation"] = federation.model_dump(mode="json", include={"name", "organisations", "classes", "shape"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def protocol_versions() -> dict[str, str]:
    """Return the versions that must be the same on both sides, so that messages and numbers mean the same."""
    torch_release = version("torch").split("+")[0]
    return {"protocol": str(PROTOCOL), "fedloom": version("fedloom"), "code": _code(), "torch": torch_release}


CODE_PACKAGES = (
    "core", "losses", "models", "data", "objectives", "methods", "engines", "trust", "config", "experiment", "deploy",
)  # fmt: skip
"""Packages whose code decides what messages and numbers mean; the command line and reports are not among them."""


@cache
def _code() -> str:
    """Return a hash of the code of `CODE_PACKAGES`; Flower's hash of the app does not cover installed packages."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(file for name in CODE_PACKAGES for file in (root / name).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(what_runs(path.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:16]


def what_runs(source: str) -> str:
    """Return a text that is equal for two Python sources if only comments, docstrings or layout differ.

    `ast.dump` would differ between versions of Python, which leave out different empty fields.
    """

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(text(one) for one in value if not _is_text(one))}]"
        if not isinstance(value, ast.AST):
            return repr(value)
        fields = ((name, one) for name, one in ast.iter_fields(value) if one not in (None, []) and name != "kind")
        return f"{type(value).__name__}({','.join(f'{name}={text(one)}' for name, one in fields)})"

    return text(ast.parse(source))


def _is_text(node: Any) -> bool:
    """Whether a node is a statement that consists of a string: a docstring of a module, class, function or field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class VersionError(UserError):
    """Raised if the other side has another version.

    Args:
        what: What differs: protocol, fedloom, code or torch.
        why: The message.
    """

    def __init__(self, what: str, why: str):
        super().__init__(why)
        self.reason = "code" if what == "code" else "version"


def refuse_other_versions(theirs: Any) -> None:
    """Compare versions with the other side's.

    Args:
        theirs: What `protocol_versions` returned on the other side, as received.

    Raises:
        VersionError: If a version differs.
    """
    mine = protocol_versions()
    theirs = theirs if isinstance(theirs, dict) else {}
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise VersionError(
                name,
                f"versions.{name} = {theirs.get(name)!r:.60} on the other side, {value!r} here: {same_version(name)}",
            )
