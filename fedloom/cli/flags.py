"""Flags shared by several commands, and the recipe fields that they set."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import offers
from fedloom.cli.base import err, say
from fedloom.core import trusted_code
from fedloom.core.errors import UserError

RecipeFile = Annotated[
    str | None,
    typer.Argument(autocompletion=offers.recipes, help="Recipe file, or the name of a shipped recipe (demo)."),
]


def _field(flag: str, what: str, default: object, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Return an option that sets a recipe field, whose help names the field's default."""
    return typer.Option(flag, autocompletion=complete, help=f"{what}; default: the recipe's, or {default}.")


Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        autocompletion=offers.methods,
        help="Method; see `fedloom methods`; +ft adds fine-tuning; file.py:Name is yours; default: fedavg.",
    ),
]
Data = Annotated[str | None, _field("--data", "Dataset name, or your folder or file", "digits", offers.datasets)]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with dataset files; default: $FEDLOOM_DATA.")]
Clients = Annotated[int | None, _field("--clients", "Number of clients", 20)]
DIVISIONS = "Division of data: iid, dirichlet:0.1, pathological:2, natural"
Partition = Annotated[str | None, _field("--partition", DIVISIONS, "dirichlet:0.1", offers.partitions)]
NETWORKS = "Network: mlp, cnn2, cnn3, cnn4, resnet18, …"
Model = Annotated[str | None, _field("--model", NETWORKS, "mlp", offers.models)]
Rounds = Annotated[int | None, _field("--rounds", "Number of communication rounds", 20)]
Epochs = Annotated[int | None, _field("--epochs", "Local epochs per round", 1)]
BatchSize = Annotated[int | None, _field("--batch-size", "Samples per training step", 32)]
Lr = Annotated[float | None, _field("--lr", "Learning rate", 0.05)]
Fraction = Annotated[float | None, _field("--fraction", "Fraction of clients that train in each round", 1)]
Seed = Annotated[int | None, _field("--seed", "Random seed", 0)]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds, comma-separated: 0,1,2")]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        autocompletion=offers.engines,
        help="Where clients run: auto, inline, processes, lanes (GPU), ray, replay.",
    ),
]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help="Head of a Ray cluster, host:port; default: start Ray here.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; default: a new folder in runs/.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Set any recipe field: --set method.mu=0.1 (repeatable).")]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", autocompletion=offers.logs, help="Also log to tensorboard, wandb or mlflow (repeatable)."),
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, help="Runs at a time, each in its own process.")]
LimitSeconds = Annotated[
    float | None, typer.Option("--limit-seconds", help="Stop between rounds after this time; a later call resumes.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def _report(file: trusted_code.CodeFile) -> bool:
    say(f"importing {file.path} (SHA-256 {file.sha256}), named by {file.named_by}", err)
    return True


def _asking() -> trusted_code.Decide:
    """Return a function that asks about each file once, even if several fields name it."""
    refused: set[Path] = set()

    def ask(file: trusted_code.CodeFile) -> bool:
        if file.path in refused:
            return False
        say(f"{file.named_by} names a Python file. Importing it runs it and the modules it imports.", err)
        say(f"  {file.path}\n  SHA-256 {file.sha256}", err)
        if typer.confirm("import it?", err=True):
            return True
        refused.add(file.path)
        return False

    return ask


def at_terminal() -> bool:
    """Return whether stdin and stderr are a terminal, so that the user can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _trust(ctx: typer.Context, value: bool) -> bool:
    if value and not ctx.resilient_parsing:
        ctx.with_resource(trusted_code.deciding(_report))
    return value


def _trust_or_ask(ctx: typer.Context, value: bool) -> bool:
    if not value and not ctx.resilient_parsing and at_terminal():
        ctx.with_resource(trusted_code.deciding(_asking()))
    return _trust(ctx, value)


_TRUSTED = "Import the Python files it names; prints each path and SHA-256."
TrustCode = Annotated[bool, typer.Option("--trust-code", callback=_trust, help=_TRUSTED)]
TrustCodeOrAsk = Annotated[
    bool, typer.Option("--trust-code", callback=_trust_or_ask, help=_TRUSTED + " Default: ask, in a terminal.")
]


def fields_of(sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Return the given flags and --set assignments by recipe field; --set takes precedence."""
    from fedloom.config.loading import read_assignment

    given = {name: value for name, value in flags.items() if value not in (None, [])}
    given = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    return given | dict(read_assignment(text) for text in sets or [])


def listed(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list; without a text, return an empty one."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def read_seeds(text: str | None) -> list[int] | None:
    """Parse a comma-separated list of seeds such as `0,1,2`; None stays None."""
    if text is None:
        return None
    for seed in (seeds := text.split(",")):
        if not seed.strip().isdigit():
            raise UserError(f"--seeds: '{seed}' is not a seed; write whole numbers such as 0,1,2")
    return [int(seed) for seed in seeds]
