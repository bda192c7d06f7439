"""`fedloom methods`, `datasets`, `recipe`, `ledger`, `data plot`: look before and after a run."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from fedloom import methods
from fedloom.cli.base import app, err, out, show_json
from fedloom.cli.completion import offers
from fedloom.cli.options import (
    BatchSize,
    Clients,
    DataDir,
    DataFlag,
    EngineFlag,
    Epochs,
    Fraction,
    Json,
    Lr,
    MethodFlag,
    ModelFlag,
    Out,
    Partition,
    RecipeFile,
    Rounds,
    Seed,
    Set,
    fields_of,
)
from fedloom.config.loading import raw_recipe
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.data import describe
from fedloom.experiment.build import make_task
from fedloom.report.federation_plot import plot_federation
from fedloom.report.ledger import ledger_lines
from fedloom.report.methods import explain, list_one, method_info
from fedloom.trust.ledger import read_ledger

data_app = typer.Typer(help="Look at data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command(name="methods")
def list_methods(
    name: Annotated[
        str | None, typer.Argument(autocompletion=offers.methods, help="Explain this one; also yours: file.py:Name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each shares and keeps, its paper and hyperparameters.

    Example: fedloom methods fedprox
    """
    rows = list(_known_methods()) if name is None else [method_info(name)]
    if as_json:
        show_json({"methods": rows})
        return
    if name is not None:
        explain(out, rows[0])
        return
    for row in rows:
        list_one(out, row)
    out.print("Any method with a global model can have fine-tuning: fedavg+ft. More: fedloom methods NAME")


def _known_methods() -> Iterator[dict[str, Any]]:
    for name in methods.METHODS.names():
        try:
            yield method_info(name) | {"name": name}
        except UserError as error:  # a package that cannot be imported is no reason to list no others
            err.print(f"note: {error}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the datasets that are known, and whether their files are here.

    Example: fedloom datasets --data-dir ~/data
    """
    rows = [asdict(info) for info in describe(data_dir)]
    if as_json:
        show_json({"datasets": json.loads(json.dumps(rows, default=str))})
        return
    table = Table()
    for column in ("dataset", "what", "classes", "here", "in the data folder"):
        table.add_column(column)
    for row in rows:
        here = "yes" if row["found"] else "–"
        places = dict.fromkeys(Path(file).parts[0] for layout in row["files"] for file in layout)
        table.add_row(row["name"], row["description"], str(row["classes"]), here, "\n".join(places))
    out.print(table)
    out.print("Also: a folder of class folders, a folder of clients' folders, an .npz file; a+b combines styles.")


@app.command(name="recipe")
def print_recipe(
    recipe: RecipeFile = None, method: MethodFlag = None, data: DataFlag = None, data_dir: DataDir = None,
    clients: Clients = None, partition: Partition = None, model: ModelFlag = None, rounds: Rounds = None,
    epochs: Epochs = None, batch_size: BatchSize = None, lr: Lr = None, fraction: Fraction = None,
    seed: Seed = None, engine: EngineFlag = None, out_dir: Out = None, set_: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Print the full resolved recipe: every field with its value.

    Example: fedloom recipe --method fedprox --rounds 50 > my.yaml
    """
    fields = fields_of(
        set_, method=method, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model,
        rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, seed=seed, engine=engine,
        out=out_dir,
    )  # fmt: skip
    values = raw_recipe(recipe, fields)
    comparison = {name: values.pop(name) for name in ("compare", "sweep") if name in values}
    resolved = Recipe.parse(values)
    if as_json:
        show_json(resolved.resolved() | comparison)
    else:
        sys.stdout.write(resolved.to_yaml() + (yaml.safe_dump(comparison) if comparison else ""))


@app.command()
def ledger(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: Json = False) -> None:
    """Show exactly what left a client in a run, and what never did: names, shapes, types, bytes, rounds, clients.

    Example: fedloom ledger runs/20260101-120000-fedrep-digits-s0
    """
    found = read_ledger(folder)
    if as_json:
        show_json(found)
        return
    for line in ledger_lines(found):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


@data_app.command(name="plot")
def plot(
    recipe: RecipeFile = None, data: DataFlag = None, data_dir: DataDir = None, clients: Clients = None,
    partition: Partition = None, seed: Seed = None, set_: Set = None,
    to: Annotated[Path, typer.Option("--to", help="The picture.")] = Path("federation.png"), as_json: Json = False,
) -> None:  # fmt: skip
    """Draw who holds what: clients by classes, dots as large as the counts.

    Example: fedloom data plot --data digits --clients 20 --partition dirichlet:0.1 --to federation.png
    """
    fields = fields_of(set_, data=data, data_dir=data_dir, clients=clients, partition=partition, seed=seed)
    values = raw_recipe(recipe, fields)
    for several in ("compare", "sweep"):
        values.pop(several, None)
    task = make_task(Recipe.parse(values))
    try:
        plot_federation(task.dataset, task.federation, to)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--to {to}: cannot be written: {reason}; for example --to federation.png") from error
    if as_json:
        show_json({"picture": str(to), "clients": task.clients, "classes": task.classes})
    else:
        out.print(f"drawn: {to}", highlight=False, markup=False, soft_wrap=True)
