"""`fedloom methods`, `datasets`, `recipe`, `ledger`, `data plot`, `data check`: inspect methods, data and runs."""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedloom.cli import catalogue, flags, offers
from fedloom.cli.base import Group, app, err, out, say, show_json
from fedloom.core.errors import UserError

data_app = typer.Typer(cls=Group, help="Inspect data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command(name="methods")
def list_methods(
    name: Annotated[
        str | None,
        typer.Argument(autocompletion=offers.methods, help="Explain this method; file.py:Name for one of yours."),
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """List the methods, or explain one: what it shares and keeps, its paper and hyperparameters.

    Examples:

      fedloom methods

      fedloom methods fedprox
    """
    shipped = {row["name"]: row for row in catalogue.catalogue()["methods"]}
    installed = [entry for entry in entry_points(group="fedloom.methods") if entry.name not in shipped]
    if name is not None:
        row = shipped.get(name.lower()) or _method_info(name)
        if as_json:
            show_json({"methods": [row]})
        else:
            _explain(row)
        return
    if as_json:
        show_json({"methods": [*shipped.values(), *({"name": e.name, "package": e.value} for e in installed)]})
        return
    for row in shipped.values():
        _list_one(row["name"], _facts(row))
    for entry in installed:
        _list_one(entry.name, [f"from the installed package {entry.dist.name if entry.dist else entry.value}"])
    out.print("Any method with a global model can be fine-tuned: fedavg+ft. More about one: fedloom methods NAME")


def _method_info(name: str) -> dict[str, Any]:
    from fedloom.report.methods import method_info  # imports torch

    return method_info(name)


def _facts(row: dict[str, Any]) -> Iterator[str]:
    yield row["what"]
    yield " · ".join(f"{verb} {', '.join(row[verb])}" for verb in ("shares", "sends", "receives", "keeps") if row[verb])
    yield ", ".join(f"{parameter['name']}={parameter['default']}" for parameter in row["parameters"])
    yield row["paper"]


def _list_one(name: str, facts: Iterable[str]) -> None:
    out.print(f"[bold]{name}[/bold]")
    for line in filter(None, facts):
        out.print(Padding(Text(line), (0, 0, 0, 4)))


def _explain(row: dict[str, Any]) -> None:
    lines = [row["more"]] if row["more"] else []
    for name in ("paper", "shares", "sends", "receives", "keeps", "server_keeps"):
        value = row[name] if isinstance(row[name], str) else ", ".join(row[name])
        if value:
            lines.append(f"{name.replace('_', ' ')}: {value}")
    tensors = ", ".join(row["leaves"]) or "no tensors"
    lines.append(
        f"leaves a client: {tensors}, and its number of samples, losses and test results; never images or single labels"
    )
    lines += [f"{part} reveals: {text}" for part, text in row["reveals"].items()]
    sections = {"robust": "robust rules", "private": "differential privacy", "secure": "secure aggregation"}
    for name, section in sections.items():
        lines.append(f"{section}: " + ("yes" if row[name] else f"no, it {row['not_' + name]}"))
    lines += [f"{one['name']} = {one['default']}  {one['what']}" for one in row["parameters"]]
    out.print(f"[bold]{row['name']}[/bold]  {escape(row['what'])}", highlight=False)
    for line in lines:
        out.print(Padding(Text(line), (0, 0, 0, 2)))


@app.command()
def datasets(data_dir: flags.DataDir = None, as_json: flags.Json = False) -> None:
    """List the known datasets, and whether their files are on this machine.

    Example: fedloom datasets --data-dir ~/data
    """
    rows = catalogue.datasets(data_dir)
    if as_json:
        show_json({"datasets": rows})
        return
    table = Table()
    for column in ("dataset", "description", "classes", "found", "in the data folder"):
        table.add_column(column)
    for row in rows:
        found = "yes" if row["found"] else "–"
        places = dict.fromkeys(Path(file).parts[0] for layout in row["files"] for file in layout)
        table.add_row(row["name"], row["description"], str(row["classes"]), found, "\n".join(places))
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
    """Print the resolved recipe: every field with its value.

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
    """Show what left the clients during a run and what never did: names, shapes, types, bytes, rounds, clients.

    Example: fedloom ledger runs/20260101-120000-fedrep-digits-s0
    """
    from fedloom.report.ledger import ledger_lines
    from fedloom.trust.ledger_file import read_ledger

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
    to: Annotated[Path, typer.Option("--to", help="Picture file to write.")] = Path("federation.png"),
    trust_code: flags.TrustCode = False,
    as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Draw the federation: clients by classes, with dot sizes proportional to sample counts.

    Images may have several sizes: only their numbers are drawn.

    Example: fedloom data plot --data digits --clients 20 --partition dirichlet:0.1 --to federation.png
    """
    from fedloom.config.loading import raw_recipe
    from fedloom.config.recipe import Recipe
    from fedloom.data.decode import SizesDifferError
    from fedloom.experiment.build import make_task
    from fedloom.report.federation_plot import plot_federation

    fields = flags.fields_of(set_, data=data, data_dir=data_dir, clients=clients, partition=partition, seed=seed)
    values = raw_recipe(recipe, fields)
    for several in ("compare", "sweep"):
        values.pop(several, None)
    wanted = Recipe.parse(values)
    try:
        task = make_task(wanted)
    except SizesDifferError:  # training needs one size, counting samples does not
        task = make_task(wanted.with_(**{"data.size": 32}))
    try:
        plot_federation(task.dataset, task.federation, to)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--to {to}: cannot be written: {reason}; for example --to federation.png") from error
    if as_json:
        show_json({"picture": str(to), "clients": task.clients, "classes": task.classes})
    else:
        say(f"picture: {to}")


@data_app.command(name="check")
def check(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A folder of images, recordings or tables, or a table or .npz file.")
    ],
    label: Annotated[str | None, typer.Option("--label", help="Column of the label in a table.")] = None,
    client: Annotated[str | None, typer.Option("--client", help="Column of the client in a table.")] = None,
    fix_list: Annotated[
        Path | None,
        typer.Option("--fix-list", help="Write what to do about each file: path, problem, action, separated by tabs."),
    ] = None,
    as_json: flags.Json = False,
) -> None:
    """Find all problems of images, recordings, tables or arrays at once, before a run: one table, errors first.

    Images: whether every file can be read, bit depth, EXIF orientation, sizes, names of folders, empty folders, class
    balance, and near-duplicates across clients, in train and test, and across classes. Recordings: readable, sample
    rates, lengths, silence, copies. Tables: missing values, dates, texts, columns, repeated rows. The exit code is 1 if
    there are errors.

    Examples:

      fedloom data check shops

      fedloom data check patients.csv --label outcome --client hospital

      fedloom data check shops --fix-list todo.tsv
    """
    from fedloom.data.check_files import check_path
    from fedloom.report.data_check import check_json, check_table, fix_lines

    with err.status("looking for files") as status:
        found = check_path(
            path, lambda done, total: status.update(f"{done:,} of {total:,} files read"), label=label, client=client
        )
    if fix_list is not None:
        try:
            fix_list.write_text("".join(fix_lines(found)), encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise UserError(f"--fix-list {fix_list}: cannot be written: {error.strerror}; name another file") from error
    if as_json:
        show_json(check_json(found))
    else:
        out.print(check_table(found))
        errors, warnings = found.number("error"), found.number("warning")
        kinds = [
            f"{n} kind{'s' if n > 1 else ''} of {what}" for n, what in ((errors, "errors"), (warnings, "warnings")) if n
        ]
        say(f"{found.files:,} {found.what}: {', '.join(kinds) or 'no errors or warnings'}")
        if fix_list is not None:
            say(f"fix list: {fix_list} ({len(found.fixes):,} lines)")
    if found.number("error"):
        raise typer.Exit(1)
