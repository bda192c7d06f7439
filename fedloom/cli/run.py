"""`fedloom run`, `resume`, `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom import api
from fedloom.cli.base import app, show, watching
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
from fedloom.cli.report import live_page
from fedloom.errors import UserError
from fedloom.recipe import Recipe
from fedloom.storage.folder import RunFolder


@app.command()
def run(
    recipe: RecipeFile = None, method: MethodFlag = None, data: DataFlag = None, data_dir: DataDir = None,
    clients: Clients = None, partition: Partition = None, model: ModelFlag = None, rounds: Rounds = None,
    epochs: Epochs = None, batch_size: BatchSize = None, lr: Lr = None, fraction: Fraction = None,
    seed: Seed = None, engine: EngineFlag = None, out_dir: Out = None, set_: Set = None, as_json: Json = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it in a browser as it goes; see `watch`.")] = False,
) -> None:  # fmt: skip
    """Run one experiment.

    Ctrl-C (or SIGTERM) finishes the round, writes a checkpoint and says how to go on; a second one leaves at once.

    Examples:

      fedloom run --method fedprox --data digits --clients 20 --partition dirichlet:0.1 --rounds 20

      fedloom run my.yaml --seed 3 --set method.mu=0.01 --set training.optimizer.momentum=0.9

      fedloom run my.yaml --out runs/mine --resume      # a job that may be stopped and started again

      fedloom run my.yaml --watch                       # a page on this machine, until Ctrl-C after the run
    """
    fields = fields_of(
        set_, method=method, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model,
        rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, seed=seed, engine=engine,
        out=out_dir,
    )  # fmt: skip
    resolved = Recipe.parse(api.raw_recipe(recipe, fields))
    if watch:
        resolved = resolved.with_(out=str(resolved.out or RunFolder.fresh(Path("runs"), resolved.label)))
    with live_page(resolved.out if watch else None) as stay:
        with watching() as start:
            summary = api.run(resolved, on_round=start(resolved), resume=resume)
        show([summary], as_json, summary)
        stay()


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
    show([summary], as_json, summary)


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
    show(summaries, as_json, {"runs": summaries, "run_dir": str(Path(summaries[0]["run_dir"]).parent)})


def _seed(text: str) -> int:
    if not text.strip().isdigit():
        raise UserError(f"--seeds: '{text}' is no seed; write whole numbers, 0,1,2")
    return int(text)
