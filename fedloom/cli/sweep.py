"""`fedloom sweep`: run one recipe with many settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import flags
from fedloom.cli.base import app, err, loading, out, say, show_json, showing_progress

if TYPE_CHECKING:
    from fedloom.experiment.records import Summary


@app.command()
def sweep(
    recipe: flags.RecipeFile = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", help="Vary FIELD=VALUE,VALUE,… or FIELD=LOW..HIGH (repeatable).")
    ] = None,
    seeds: flags.Seeds = None,
    random: Annotated[
        int | None, typer.Option("--random", help="Number of settings to draw at random; default: all combinations.")
    ] = None,
    parallel: Annotated[int | None, typer.Option("--parallel", help="Runs at a time, each single-threaded.")] = None,
    method: flags.Method = None, data: flags.Data = None, data_dir: flags.DataDir = None, clients: flags.Clients = None,
    partition: flags.Partition = None, model: flags.Model = None, rounds: flags.Rounds = None,
    epochs: flags.Epochs = None, batch_size: flags.BatchSize = None, lr: flags.Lr = None,
    fraction: flags.Fraction = None, engine: flags.Engine = None, out_dir: flags.Out = None, set_: flags.Set = None,
    log: flags.Log = None, as_json: flags.Json = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the sweep in --out; start it if there is none.")
    ] = False,
    trust_code: flags.TrustCode = False,
) -> None:  # fmt: skip
    """Run one recipe with many settings and seeds; print a table and draw a curve, or a heat map over two fields.

    The table reports test accuracy: do not choose hyperparameters by it. With validation samples (--set
    data.split=pooled:0.6:0.2) the setting that is best on them is named and marked. Ctrl-C stops every run with a
    checkpoint; `fedloom resume FOLDER` continues.

    Examples:

      fedloom sweep --method fedprox --over method.mu=0.01,0.1,1 --over lr=0.01,0.1 --seeds 0,1 --rounds 10

      fedloom sweep my.yaml --over lr=0.01,0.1 --set data.split=pooled:0.6:0.2      # choose by validation

      fedloom sweep my.yaml --over training.optimizer.lr=0.001..0.1 --random 20 --parallel 2 --out runs/lr

      fedloom sweep sweeps/fedcrc-tau      # shipped, in the style of FedCRC's Table III
    """
    loading()
    from fedloom.runs.sweep import read_over, sweep

    fields = flags.fields_of(
        set_, method=method, data=data, data_dir=data_dir, clients=clients, partition=partition, model=model,
        rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, fraction=fraction, engine=engine, out=out_dir,
        log=log,
    )  # fmt: skip
    with showing_progress() as start:
        runs = sweep(
            recipe, over=dict(map(read_over, over)) if over else None, seeds=flags.read_seeds(seeds), random=random,
            parallel=parallel, resume=resume, on_run=lambda one: start(one, str(one.out)), **fields,
        )  # fmt: skip
    show_sweep(runs, as_json)


def resume_sweep(folder: Path, fields: dict[str, Any], as_json: bool) -> None:
    """Resume the sweep in a folder."""
    from fedloom.runs.sweep import SWEEP, sweep

    with showing_progress() as start:
        runs = sweep(
            folder / SWEEP, resume=True, on_run=lambda one: start(one, str(one.out)), **fields | {"out": folder}
        )
    show_sweep(runs, as_json)


def show_sweep(runs: "list[Summary]", as_json: bool) -> None:
    """Print the table, or JSON, and draw the picture in the sweep's folder."""
    from fedloom.report.sweep import best_setting, by_setting, choice, plot_sweep, sweep_table

    folder = Path(runs[0]["run_dir"]).parent
    picture = folder / "sweep.png"
    plot_sweep(runs, picture)
    best = best_setting(runs)
    note = choice(runs, best)
    say(f"note: {note}", err)
    if as_json:
        found: list[dict[str, Any]] = [{"setting": setting, "runs": group} for setting, group in by_setting(runs)]
        if best is not None:
            found = [one | {"best": one["setting"] == best.setting} for one in found]
        shown = {"settings": found, "picture": str(picture), "note": note, "run_dir": str(folder)}
        show_json(shown if best is None else shown | {"best": best.to_json()})
        return
    out.print(sweep_table(runs))
    for line in (f"picture: {picture}", f"run folders: {folder}"):
        say(line)
