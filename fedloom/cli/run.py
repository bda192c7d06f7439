"""`fedloom run`, `resume`, `compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import flags, offers
from fedloom.cli.base import app, loading, say, show, showing_progress
from fedloom.cli.report import live_page
from fedloom.cli.sweep import resume_sweep
from fedloom.core import trusted_code

if TYPE_CHECKING:
    from fedloom.runs.result import Runs

Watch = Annotated[
    bool, typer.Option("--watch", help="Show the training in a browser, until Ctrl-C; see `fedloom watch`.")
]


@app.command()
def run(
    recipe: flags.RecipeFile = None, method: flags.Method = None, data: flags.Data = None,
    data_dir: flags.DataDir = None, clients: flags.Clients = None, partition: flags.Partition = None,
    model: flags.Model = None, rounds: flags.Rounds = None, epochs: flags.Epochs = None,
    batch_size: flags.BatchSize = None, lr: flags.Lr = None, fraction: flags.Fraction = None, seed: flags.Seed = None,
    engine: flags.Engine = None, ray_address: flags.RayAddress = None, out_dir: flags.Out = None,
    set_: flags.Set = None, log: flags.Log = None, as_json: flags.Json = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out; start it if there is none.")
    ] = False,
    watch: Watch = False,
    trust_code: flags.TrustCode = False,
) -> None:  # fmt: skip
    """Run one experiment.

    Ctrl-C (or SIGTERM) finishes the round, writes a checkpoint and prints how to resume. A second signal exits at once.

    Examples:

      fedloom run --method fedprox --data digits --clients 20 --partition dirichlet:0.1 --rounds 20

      fedloom run my.yaml --seed 3 --set method.mu=0.01 --set training.optimizer.momentum=0.9

      fedloom run my.yaml --engine ray --ray-address 10.0.0.5:6379

      fedloom run my.yaml --out runs/mine --resume      # safe to stop and start again

      fedloom run my.yaml --watch                       # served on this machine until Ctrl-C
    """
    loading()
    from fedloom.config.loading import raw_recipe
    from fedloom.config.recipe import Recipe
    from fedloom.experiment.run_folder import RunFolder
    from fedloom.runs.run import run

    fields = flags.fields_of(
        set_, method=method, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model,
        rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, seed=seed, engine=engine,
        ray_address=ray_address, out=out_dir, log=log,
    )  # fmt: skip
    resolved = Recipe.parse(raw_recipe(recipe, fields))
    if watch:
        resolved = resolved.with_(out=str(resolved.out or RunFolder.fresh(Path("runs"), resolved.label)))
    with live_page(resolved.out if watch else None) as stay:
        with showing_progress() as start:
            summary = run(resolved, on_round=start(resolved), resume=resume).finished
        show([summary], as_json, summary)
        stay()


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, comparison or sweep.")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="New total number of rounds of a run, finished or not.")
    ] = None,
    data_dir: flags.DataDir = None, engine: flags.Engine = None, ray_address: flags.RayAddress = None,
    set_: flags.Set = None, watch: Watch = False, trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:  # fmt: skip
    """Resume a run, comparison or sweep that was stopped or killed; results are bit-identical to an uninterrupted one.

    A run resumes from its last checkpoint; finished runs of a comparison or sweep are kept. Only engine, storage, log
    and data.dir can be changed. Python files that the recipe names are imported only with your consent: you are asked,
    or you pass --trust-code.

    With --rounds, a single run continues to another total number of rounds, even if it is finished. The result equals
    a run that was started with that number. This is refused if learning rates depend on it (training.schedule: cosine).

    Examples:

      fedloom resume runs/20250101-120000-fedcrl-digits-s0

      fedloom resume runs/mine --engine processes --set engine.workers=4

      fedloom resume runs/mine --watch            # shown in a browser

      fedloom resume runs/mine --rounds 300       # extends a run that has finished 200 rounds
    """
    loading()
    from fedloom.runs.compare import holds_comparison, resume_comparison
    from fedloom.runs.run import recipe_of, resume_run
    from fedloom.runs.sweep import holds_sweep

    fields = flags.fields_of(set_, data_dir=data_dir, rounds=rounds, engine=engine, ray_address=ray_address)
    with live_page(run_dir if watch else None) as stay:
        if holds_sweep(run_dir):
            resume_sweep(run_dir, fields, as_json)
        elif holds_comparison(run_dir):
            with showing_progress() as start:
                summaries = resume_comparison(run_dir, on_run=start, **fields)
            show_comparison(summaries, as_json)
        else:
            recipe = recipe_of(run_dir, fields)
            trusted_code.require(f"the recipe of '{run_dir}'", recipe.model_dump())  # before the progress bar starts
            with showing_progress() as start:
                summary = resume_run(recipe, start(recipe)).finished
            show([summary], as_json, summary)
        stay()


@app.command()
def compare(
    recipe: flags.RecipeFile = None,
    names: Annotated[
        str | None,
        typer.Option("--methods", autocompletion=offers.methods, help="Methods, comma-separated: local,fedavg,repper"),
    ] = None,
    seeds: flags.Seeds = None,
    data: flags.Data = None, data_dir: flags.DataDir = None, clients: flags.Clients = None,
    partition: flags.Partition = None, model: flags.Model = None, rounds: flags.Rounds = None,
    epochs: flags.Epochs = None, batch_size: flags.BatchSize = None, lr: flags.Lr = None,
    fraction: flags.Fraction = None, engine: flags.Engine = None, ray_address: flags.RayAddress = None,
    out_dir: flags.Out = None, set_: flags.Set = None, log: flags.Log = None, as_json: flags.Json = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the comparison in --out; start it if there is none.")
    ] = False,
    parallel: flags.Parallel = 1,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html in the comparison's folder at the end.")
    ] = False,
    watch: Watch = False,
    trust_code: flags.TrustCode = False,
) -> None:  # fmt: skip
    """Run several methods and seeds on the same federation and print one table.

    Examples:

      fedloom compare demo

      fedloom compare --methods local,fedavg,fedprox,fedavg+ft --seeds 0,1,2 --data digits --rounds 20

      fedloom compare my.yaml --parallel 4 --watch       # four runs at a time, shown in a browser

      fedloom compare demo --out runs/demo --resume      # safe to stop and start again

      fedloom compare --methods fedavg,repper --set data.newcomers=5 --set 'compare.newcomers={labelled: [10, 40]}'
    """
    loading()
    from fedloom.config.loading import raw_recipe
    from fedloom.experiment.run_folder import RunFolder
    from fedloom.runs.compare import compare

    fields = flags.fields_of(
        set_, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model, rounds=rounds,
        epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, engine=engine, ray_address=ray_address,
        out=out_dir, log=log,
    )  # fmt: skip
    if watch and "out" not in fields:
        fields["out"] = raw_recipe(recipe, {}).get("out") or str(RunFolder.fresh(Path("runs"), "compare"))
    chosen = None if names is None else flags.listed(names)
    with live_page(Path(fields["out"]) if watch else None) as stay:
        with showing_progress() as start:
            summaries = compare(
                recipe, methods=chosen, seeds=flags.read_seeds(seeds), on_run=start, resume=resume, parallel=parallel,
                report=report or None, **fields,
            )  # fmt: skip
        show_comparison(summaries, as_json)
        stay()


def show_comparison(runs: "Runs", as_json: bool) -> None:
    """Print the results of a comparison: clients, newcomers if there are any, and where the report is."""
    from fedloom.runs.compare import about
    from fedloom.runs.result import REPORT

    value: dict[str, Any] = {"runs": runs, "run_dir": str(runs.folder)}
    if (newcomers := runs.newcomers) is not None:
        value["newcomers"] = newcomers
    if (runs.folder / REPORT).exists():
        value["report"] = str(runs.folder / REPORT)
    if (text := about(runs.folder)) and not as_json:
        say(text)
    show(runs, as_json, value)
