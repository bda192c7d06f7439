"""Terms that all parties must share: recipe, classes, image shape and code."""

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
from fedloom.data.federation import read_split
from fedloom.experiment.run_folder import versions
from fedloom.trust.faults import Faults

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
            raise UserError(f"'{folder}' has no federation.yaml: give a folder that `fedloom deploy init` created")
        return checked(cls, read_yaml(path))

    def number(self, organisation: str) -> int:
        """Return the client number of an organisation."""
        if organisation not in self.organisations:
            known = ", ".join(self.organisations)
            raise UserError(f"'{organisation}' is not one of the federation's organisations ({known})")
        return self.organisations.index(organisation)


def deployable(recipe: Recipe) -> Recipe:
    """Return the recipe if a real federation can run it.

    Raises:
        UserError: If the recipe needs pooled data, attacks, faults, validation images or further figures.
    """
    method = recipe.make_method()
    if method.pooled:
        raise UserError(f"method.name = '{method.name}': pools all data in one place; choose a federated method")
    if method.overrides("generalise"):
        raise UserError(
            f"method.name = '{method.name}': its evaluation gathers several clients' data in one place, which a "
            "federation cannot do; choose another method"
        )
    if recipe.attack is not None:
        raise UserError("attack: is only for simulations on one machine; remove the section")
    if recipe.faults != Faults():
        raise UserError("faults: are only for simulations on one machine; remove the section")
    if recipe.model.weights is not None:
        raise UserError(
            f"model.weights = '{recipe.model.weights}': is a file on one machine; deployments do not support it yet, "
            "remove the field"
        )
    if recipe.data.normalise not in (None, "half"):
        raise UserError(
            f"data.normalise = '{recipe.data.normalise}': is measured over all clients' images, which no party has; "
            "use half"
        )
    if wanted := recipe.evaluation.wanted:
        raise UserError(
            f"evaluation.metrics = {', '.join(wanted)}: organisations answer with noisy numbers of correct predictions "
            "only, since their consent covers no other figures; remove evaluation.metrics and evaluation.measure"
        )
    if read_split(recipe.data.split).validation or recipe.training.patience is not None:
        patience = recipe.training.patience
        field = f"data.split = '{recipe.data.split}'" if patience is None else f"training.patience = {patience}"
        raise UserError(
            f"{field}: organisations do not evaluate on validation images, because each further answer reveals more "
            "about their images; choose settings and the number of rounds in a simulation, and use data.split = "
            "pooled:0.75 without training.patience"
        )
    return recipe


def is_run(name: object) -> bool:
    """Whether a value is a valid run name; each party creates a folder of this name."""
    return isinstance(name, str) and re.fullmatch(r"[\w+-][\w.+-]{0,99}", name) is not None


def fingerprint(recipe: Recipe, federation: FederationTerms) -> str:
    """Return a hash of all settings that must be the same for all parties."""
    values: dict[str, Any] = {k: v for k, v in recipe.resolved().items() if k not in EACH_DECIDES}
    values["data"] = {name: values["data"][name] for name in OF_THE_DATA}
    values["federation"] = federation.model_dump(mode="json", include={"name", "organisations", "classes", "shape"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def protocol_versions() -> dict[str, str]:
    """Return the versions that must be the same on both sides, so that messages and numbers mean the same."""
    torch_release = torch.__version__.split("+")[0]
    return {"protocol": str(PROTOCOL), "fedloom": versions()["fedloom"], "code": _code(), "torch": torch_release}


@cache
def _code() -> str:
    """Return a hash of fedloom's source code; Flower's hash of the app does not cover installed packages."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def refuse_other_versions(theirs: Any) -> None:
    """Raise UserError with the first version that differs from the other side's.

    Args:
        theirs: What `protocol_versions` returned on the other side, as received.
    """
    mine = protocol_versions()
    theirs = theirs if isinstance(theirs, dict) else {}
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise UserError(
                f"versions.{name} = {theirs.get(name)!r:.60} on the other side, {value!r} here: install the same "
                "version of fedloom and torch on both sides"
            )
