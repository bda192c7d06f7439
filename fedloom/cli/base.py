"""The application that commands add themselves to, and how they speak: tables on stdout, progress on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import cleandoc
from typing import Any

import typer
from rich.console import Console

from fedloom.config.recipe import Recipe
from fedloom.core.registry import short
from fedloom.core.signals import Interrupted
from fedloom.experiment.records import Summary
from fedloom.experiment.run_folder import without_nan
from fedloom.report.progress import RunProgress
from fedloom.report.table import comparison_table

app = typer.Typer(
    help="Personalised, representation-based federated learning.\n\nStart with: fedloom compare demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

out = Console()
err = Console(stderr=True)


def flow(commands: typer.Typer) -> None:
    """Lets paragraphs of help texts flow to the terminal's width: typer would keep the line breaks of the source."""
    for command in commands.registered_commands:
        paragraphs = cleandoc((command.callback and command.callback.__doc__) or "").split("\n\n")
        command.help = "\n\n".join(text.replace("\n", " ") for text in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance:
            flow(group.typer_instance)


def show_json(value: Any) -> None:
    """The last line of stdout."""
    sys.stdout.write(json.dumps(without_nan(value)) + "\n")


@contextmanager
def watching() -> Iterator[Any]:
    """Makes a progress display per run, and ends the last one whatever happens; a run that was stopped says so."""
    shown: list[RunProgress] = []

    def start(recipe: Recipe, title: str | None = None) -> RunProgress:
        for progress in shown:
            progress.stop()
        title = title or f"{short(recipe.method.name)} (seed {recipe.seed})"
        shown.append(RunProgress(title, recipe.training.rounds, err))
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


def show(summaries: list[Summary], as_json: bool, value: Mapping[str, Any]) -> None:
    """A table, or JSON; and where everything is."""
    for note in dict.fromkeys(note for summary in summaries for note in summary["notes"]):
        err.print(f"note: {note}", highlight=False, markup=False)
    if as_json:
        show_json(value)
        return
    out.print(comparison_table(summaries))
    out.print(f"run folder: {value['run_dir']}", highlight=False, markup=False, soft_wrap=True)
