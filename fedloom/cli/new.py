"""`fedloom new`: write a template for your own method, model, objective or dataset."""

import re
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedloom.cli import flags
from fedloom.cli.base import app, say, show_json
from fedloom.core.errors import UserError


class Kind(StrEnum):
    """Kinds of templates."""

    METHOD = "method"
    MODEL = "model"
    OBJECTIVE = "objective"
    DATASET = "dataset"


USE = {
    Kind.METHOD: "--method {file}:{thing}",
    Kind.MODEL: "--model {file}:{thing}",
    Kind.OBJECTIVE: "--set objective.name={file}:{thing}",
    Kind.DATASET: "--data {file}:{thing}",
}


@app.command()
def new(
    kind: Annotated[Kind, typer.Argument(help="Kind of template.")],
    name: Annotated[str, typer.Argument(help="Name in lower-case letters, digits and _.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")] = Path(),
    as_json: flags.Json = False,
) -> None:
    """Write a small working method, model, objective or dataset, with a test, for you to change.

    Examples:

      fedloom new method mine      # mine.py and test_mine.py; then: pytest test_mine.py

      fedloom new dataset stripes --to mycode
    """
    written = write(kind, name, to)
    thing = name if kind is Kind.DATASET else _class_name(name)
    use = "fedloom run " + USE[kind].format(file=written[0], thing=thing)
    if as_json:
        show_json({"files": [str(path) for path in written], "use": use})
        return
    test = f"pytest {written[1]}" + ("" if find_spec("pytest") else "      (after: pip install pytest)")
    for line in (f"written: {written[0]}, {written[1]}", f"test it: {test}", f"run it:  {use}"):
        say(line)


def write(kind: Kind, name: str, folder: Path) -> list[Path]:
    """Write the file and its test; neither may exist already."""
    from fedloom.experiment.files import unwritable
    from fedloom.methods import METHODS
    from fedloom.objectives import OBJECTIVES

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"new {kind} '{name}': use lower-case letters, digits and _, as in: fedloom new {kind} mine")
    shipped = {Kind.METHOD: set(METHODS), Kind.OBJECTIVE: set(OBJECTIVES)}
    if _class_name(name).lower() in shipped.get(kind, set()):
        raise UserError(f"new {kind} '{name}': fedloom has a {kind} of this name; choose another name")
    texts = files("fedloom") / "cli" / "templates"
    made = {folder / f"{name}.py": f"{kind}.py.txt", folder / f"test_{name}.py": f"test_{kind}.py.txt"}
    if present := [path for path in made if path.exists()]:
        raise UserError(f"new {kind} '{name}': {present[0]} already exists; choose another name, or --to FOLDER")
    for path, source in made.items():
        text = Template((texts / source).read_text(encoding="utf-8")).substitute(Name=_class_name(name), name=name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from error
    return list(made)


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
