"""The command line: `fedloom run`, `resume`, `compare`, `methods`, `datasets`, `recipe`, `ledger`, `data plot`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedloom import api, methods
from fedloom.data import describe
from fedloom.data.plot import plot_federation
from fedloom.errors import RunError, UserError
from fedloom.interrupts import Interrupted
from fedloom.ledger import read_ledger
from fedloom.preparing import make_task
from fedloom.raw import read_assignment
from fedloom.recipe import Recipe
from fedloom.report.ledger import ledger_lines
from fedloom.report.methods import explain, list_one, method_info
from fedloom.report.progress import RunProgress
from fedloom.report.table import comparison_table
from fedloom.storage.folder import without_nan

app = typer.Typer(
    help="Personalised, representation-based federated learning.\n\nStart with: fedloom compare demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data.", no_args_is_help=True)
app.add_typer(data_app, name="data")

out = Console()
err = Console(stderr=True)

RecipeFile = Annotated[str | None, typer.Argument(help="A recipe file, or the name of a shipped one (demo).")]
MethodFlag = Annotated[str | None, typer.Option("--method", help="See `fedloom methods`; +ft adds fine-tuning.")]
DataFlag = Annotated[str | None, typer.Option("--data", help="A dataset, a folder of images, an .npz file.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where dataset files lie; else $FEDLOOM_DATA.")]
Clients = Annotated[int | None, typer.Option("--clients", help="How many clients.")]
Partition = Annotated[str | None, typer.Option("--partition", help="iid, dirichlet:0.1, pathological:2, …")]
ModelFlag = Annotated[str | None, typer.Option("--model", help="mlp, cnn2, cnn3, cnn4, resnet18, …")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Communication rounds.")]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Local epochs of a round.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Samples of a training step.")]
Lr = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Fraction = Annotated[float | None, typer.Option("--fraction", help="Share of clients in a round.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Everything random follows from it.")]
EngineFlag = Annotated[str | None, typer.Option("--engine", help="auto, inline, processes, lanes (GPU), replay.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; default: a new one under runs/.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any field: --set method.mu=0.1 (repeatable).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]


def fields_of(sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Flags that were given, then --set, by field."""
    given = {name: value for name, value in flags.items() if value is not None}
    return given | dict(read_assignment(text) for text in sets or [])


def show_json(value: Any) -> None:
    """The last line of stdout."""
    sys.stdout.write(json.dumps(without_nan(value)) + "\n")


@contextmanager
def watching() -> Iterator[Any]:
    """Makes a progress display per run, and ends the last one whatever happens; a run that was stopped says so."""
    shown: list[RunProgress] = []

    def start(recipe: Recipe) -> RunProgress:
        for progress in shown:
            progress.stop()
        shown.append(RunProgress(f"{recipe.method.name} (seed {recipe.seed})", recipe.training.rounds, err))
        return shown[-1]

    try:
        yield start
    except Interrupted as stopped:
        for progress in shown:
            progress.stop()
        err.print(str(stopped), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        for progress in shown:
            progress.stop()


@app.command()
def run(
    recipe: RecipeFile = None, method: MethodFlag = None, data: DataFlag = None, data_dir: DataDir = None,
    clients: Clients = None, partition: Partition = None, model: ModelFlag = None, rounds: Rounds = None,
    epochs: Epochs = None, batch_size: BatchSize = None, lr: Lr = None, fraction: Fraction = None,
    seed: Seed = None, engine: EngineFlag = None, out_dir: Out = None, set_: Set = None, as_json: Json = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")] = False,
) -> None:  # fmt: skip
    """Run one experiment.

    Ctrl-C (or SIGTERM) finishes the round, writes a checkpoint and says how to go on; a second one leaves at once.

    Examples:

      fedloom run --method fedprox --data digits --clients 20 --partition dirichlet:0.1 --rounds 20

      fedloom run my.yaml --seed 3 --set method.mu=0.01 --set training.optimizer.momentum=0.9

      fedloom run my.yaml --out runs/mine --resume      # a job that may be stopped and started again
    """
    fields = fields_of(
        set_, method=method, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model,
        rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, seed=seed, engine=engine,
        out=out_dir,
    )  # fmt: skip
    resolved = Recipe.parse(api.raw_recipe(recipe, fields))
    with watching() as start:
        summary = api.run(resolved, on_round=start(resolved), resume=resume)
    report([summary], as_json, summary)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    data_dir: DataDir = None, engine: EngineFlag = None, set_: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Go on with a run that was stopped or killed, from its last checkpoint: the same result, bit for bit.

    Only where and how fast it goes on can be changed (engine, storage, data.dir).

    Examples:

      fedloom resume runs/20250101-120000-fedcrl-digits-s0

      fedloom resume runs/mine --engine processes --set engine.workers=4
    """
    recipe = api.recipe_of(run_dir, fields_of(set_, data_dir=data_dir, engine=engine))
    with watching() as start:
        summary = api.run(recipe, on_round=start(recipe), resume=True)
    report([summary], as_json, summary)


@app.command()
def compare(
    recipe: RecipeFile = None,
    names: Annotated[str | None, typer.Option("--methods", help="Comma-separated: local,fedavg,fedavg+ft")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Comma-separated: 0,1,2")] = None,
    data: DataFlag = None, data_dir: DataDir = None, clients: Clients = None, partition: Partition = None,
    model: ModelFlag = None, rounds: Rounds = None, epochs: Epochs = None, batch_size: BatchSize = None,
    lr: Lr = None, fraction: Fraction = None, engine: EngineFlag = None, out_dir: Out = None, set_: Set = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run several methods (and seeds) on the same federation: one table.

    Examples:

      fedloom compare demo

      fedloom compare --methods local,fedavg,fedprox,fedavg+ft --seeds 0,1,2 --data digits --rounds 20
    """
    fields = fields_of(
        set_, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model, rounds=rounds,
        epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, engine=engine, out=out_dir,
    )  # fmt: skip
    chosen = None if names is None else [name.strip() for name in names.split(",")]
    numbers = None if seeds is None else [_seed(text) for text in seeds.split(",")]
    with watching() as start:
        summaries = api.compare(recipe, methods=chosen, seeds=numbers, on_run=start, **fields)
    report(summaries, as_json, {"runs": summaries, "run_dir": str(Path(summaries[0]["run_dir"]).parent)})


def _seed(text: str) -> int:
    if not text.strip().isdigit():
        raise UserError(f"--seeds: '{text}' is no seed; write whole numbers, 0,1,2")
    return int(text)


def report(summaries: list[dict[str, Any]], as_json: bool, value: dict[str, Any]) -> None:
    """A table, or JSON; and where everything is."""
    for note in dict.fromkeys(note for summary in summaries for note in summary["notes"]):
        err.print(f"note: {note}", highlight=False, markup=False)
    if as_json:
        show_json(value)
        return
    out.print(comparison_table(summaries))
    out.print(f"run folder: {value['run_dir']}", highlight=False, markup=False, soft_wrap=True)


@app.command(name="methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None, as_json: Json = False
) -> None:
    """List the methods: what each shares and keeps, its paper and hyperparameters.

    Example: fedloom methods fedprox
    """
    rows = [method_info(n) for n in sorted(methods.REGISTRY)] if name is None else [method_info(name)]
    if as_json:
        show_json({"methods": rows})
        return
    if name is not None:
        explain(out, rows[0])
        return
    for row in rows:
        list_one(out, row)
    out.print("Any method with a global model can have fine-tuning: fedavg+ft. More: fedloom methods NAME")


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
    values = api.raw_recipe(recipe, fields)
    comparison = {"compare": values.pop("compare")} if "compare" in values else {}
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
    values = api.raw_recipe(recipe, fields)
    values.pop("compare", None)
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


def main() -> None:
    """Entry point: a user's mistake is one message and exit code 2; a run that cannot go on, one and exit code 1."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except (UserError, RunError) as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        for note in getattr(error, "__notes__", []):
            err.print(note, highlight=False, markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
