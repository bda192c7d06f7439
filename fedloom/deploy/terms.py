"""What all parties must agree on before anything is computed: the recipe, the classes, the images, the code."""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError
from fedloom.experiment.run_folder import versions
from fedloom.trust.faults import Faults

PROTOCOL = 2
"""Of the messages; another number is another language."""
EACH_DECIDES = ("engine", "storage", "out")
"""Sections that are a party's own business."""
OF_THE_DATA = ("split", "augment", "views", "normalise", "seed")
"""Fields of `data` that hold for everybody; which images a client has is its own business."""


class FederationTerms(Section):
    """`federation.yaml`: who and where, and what the images are. The same file for everybody."""

    name: str = Field(description="names the federation")
    host: str = Field(description="name or address under which organisations reach the server")
    port: int = Field(9092, ge=1, le=65535, description="where organisations reach it")
    control_port: int = Field(9093, ge=1, le=65535, description="where the server is controlled, on its own machine")
    organisations: tuple[str, ...] = Field(min_length=1, description="their order numbers them, from 0")
    classes: tuple[str, ...] = Field(min_length=1, description="what images are told apart into, in this order")
    shape: tuple[int, int, int] = Field(description="channels, height, width of an image")

    @classmethod
    def load(cls, folder: Path) -> "FederationTerms":
        """From a folder of `fedloom deploy init`."""
        path = folder / "federation.yaml"
        if not path.is_file():
            raise UserError(f"'{folder}' has no federation.yaml: give a folder that `fedloom deploy init` wrote")
        return checked(cls, read_yaml(path))

    def number(self, organisation: str) -> int:
        """Which client an organisation is."""
        if organisation not in self.organisations:
            known = ", ".join(self.organisations)
            raise UserError(f"'{organisation}' is none of the federation's organisations ({known})")
        return self.organisations.index(organisation)


def deployable(recipe: Recipe) -> Recipe:
    """The recipe, if a federation can follow it at all; otherwise why not."""
    method = recipe.make_method()
    if method.pooled:
        raise UserError(f"method.name = '{method.name}': pools all data in one place; choose a federated method")
    if method.overrides("generalise"):
        raise UserError(
            f"method.name = '{method.name}': its evaluation gathers several clients' data in one place, which no "
            "federation does; choose another method"
        )
    if recipe.attack is not None:
        raise UserError("attack: is for study on one machine; remove the section")
    if recipe.faults != Faults():
        raise UserError("faults: are for study on one machine; remove the section")
    if recipe.data.normalise != "half":
        raise UserError(
            f"data.normalise = '{recipe.data.normalise}': is measured over all clients' images, which nobody has "
            "here; use half"
        )
    return recipe


def is_run(name: object) -> bool:
    """Whether it can name a run, which has a folder of this name with every party."""
    return isinstance(name, str) and re.fullmatch(r"[\w+-][\w.+-]{0,99}", name) is not None


def fingerprint(recipe: Recipe, federation: FederationTerms) -> str:
    """Of all that must be the same for everybody."""
    values: dict[str, Any] = {k: v for k, v in recipe.resolved().items() if k not in EACH_DECIDES}
    values["data"] = {name: values["data"][name] for name in OF_THE_DATA}
    values["federation"] = federation.model_dump(mode="json", include={"name", "organisations", "classes", "shape"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def language() -> dict[str, str]:
    """Versions that must be the same on both sides for the numbers to mean the same."""
    torch_release = torch.__version__.split("+")[0]
    return {"protocol": str(PROTOCOL), "fedloom": versions()["fedloom"], "code": _code(), "torch": torch_release}


@cache
def _code() -> str:
    """Of fedloom's own source: Flower's hash of the app does not cover what is installed."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def refuse_other_language(theirs: Any) -> None:
    """Names the first version that differs."""
    mine = language()
    theirs = theirs if isinstance(theirs, dict) else {}
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise UserError(
                f"versions.{name} = {theirs.get(name)!r:.60} at the other side, {value!r} here: install the same "
                "version of fedloom and torch on both"
            )
