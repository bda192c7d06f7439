"""`fedloom methods`, `datasets`, `recipe`, `ledger`, `data plot`: look before and after a run."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedloom.cli import flags, offers
from fedloom.cli.base import app, err, out, say, show_json
from fedloom.core.errors import UserError

data_app = typer.Typer(help="Look at data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command(name="methods")
def list_methods(
    name: Annotated[
        str | None, typer.Argument(autocompletion=offers.methods, help="Explain this one; also yours: file.py:Name.")
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """List the methods: what each shares and keeps, its paper and hyperparameters.

    Example: fedloom methods fedprox
    """
    from fedloom.report.methods import explain, list_one, method_info

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
    from fedloom.methods import METHODS
    from fedloom.report.methods import method_info

    for name in METHODS.names():
        try:
            yield method_info(name) | {"name": name}
        except UserError as error:  # a package that cannot be imported is no reason to list no others
            say(f"note: {error}", err)


@app.command()
def datasets(data_dir: flags.DataDir = None, as_json: flags.Json = False) -> None:
    """List the datasets that are known, and whether their files are here.

    Example: fedloom datasets --data-dir ~/data
    """
    from fedloom.data import describe

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
    recipe: flags.RecipeFile = None, method: flags.Method = None, data: flags.Data = None,
    data_dir: flags.DataDir = None, clients: flags.Clients = None, partition: flags.Partition = None,
    model: flags.Model = None, rounds: flags.Rounds = None, epochs: flags.Epochs = None,
    batch_size: flags.BatchSize = None, lr: flags.Lr = None, fraction: flags.Fraction = None, seed: flags.Seed = None,
    engine: flags.Engine = None, out_dir: flags.Out = None, set_: flags.Set = None,
    trust_code: flags.TrustCode = False, as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Print the full resolved recipe: every field with its value.

    Example: fedloom recipe --method fedprox --rounds 50 > my.yaml
    """
    import yaml

    from fedloom.config.loading import raw_recipe
    from fedloom.config.recipe import Recipe

    fields = flags.fields_of(
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
def ledger(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: flags.Json = False
) -> None:
    """Show exactly what left a client in a run, and what never did: names, shapes, types, bytes, rounds, clients.

    Example: fedloom ledger runs/20260101-120000-fedrep-digits-s0
    """
    from fedloom.report.ledger import ledger_lines
    from fedloom.trust.ledger import read_ledger

    found = read_ledger(folder)
    if as_json:
        show_json(found)
        return
    for line in ledger_lines(found):
        say(line)


@data_app.command(name="plot")
def plot(
    recipe: flags.RecipeFile = None, data: flags.Data = None, data_dir: flags.DataDir = None,
    clients: flags.Clients = None, partition: flags.Partition = None, seed: flags.Seed = None, set_: flags.Set = None,
    to: Annotated[Path, typer.Option("--to", help="The picture.")] = Path("federation.png"),
    trust_code: flags.TrustCode = False,
    as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Draw who holds what: clients by classes, dots as large as the counts.

    Example: fedloom data plot --data digits --clients 20 --partition dirichlet:0.1 --to federation.png
    """
    from fedloom.config.loading import raw_recipe
    from fedloom.config.recipe import Recipe
    from fedloom.experiment.build import make_task
    from fedloom.report.federation_plot import plot_federation

    fields = flags.fields_of(set_, data=data, data_dir=data_dir, clients=clients, partition=partition, seed=seed)
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
        say(f"drawn: {to}")
