"""The typer application, and output shared by all commands: results on stdout, progress on stderr."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from fedloom.core import trusted_code
from fedloom.core.errors import printable
from fedloom.core.signals import Interrupted

if TYPE_CHECKING:
    from fedloom.config.recipe import Recipe
    from fedloom.experiment.records import Summary


UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""Click's `UsageError`, from the click that typer uses: a package, or since typer 0.26 a copy in it."""


class Group(TyperGroup):
    """A group of commands that suggests a command once: typer repeats what click suggests."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; for an unknown name, suggest one that is nearly the same."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


def unknown_option(error: Any) -> Any:
    """Return an error that names the option or the recipe field that is meant, for commands that take --set."""
    from fedloom.config.loading import ELSEWHERE

    command = error.ctx.command if error.ctx else None
    options = {name: option for option in (command.params if command else ()) for name in option.opts}
    name = error.option_name.lstrip("-").replace("-", "_")
    other = f"--{ELSEWHERE.get(name, '')}".replace("_", "-")
    message = f"No such option: {error.option_name}."
    if other in options:
        return UsageError(f"{message} Did you mean '{other}'?", error.ctx)
    if "--set" not in options:
        return error
    from fedloom.config.recipe import methods_with, path_of_field

    if path := path_of_field(name):
        return UsageError(f"{message} Write --set {path}=…", error.ctx)
    if found := methods_with(name):
        some = ", ".join(found[:6]) + (", …" if len(found) > 6 else "")
        return UsageError(f"{message} '{name}' is an option of {some}: write --set method.{name}=…", error.ctx)
    return error


class Command(TyperCommand):
    """A command that answers an option that is a recipe field with the way to set the field."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            if type(error).__name__ != "NoSuchOption":
                raise
            raise _of_pfllib(error, given) or unknown_option(error) from None


def _of_pfllib(error: Any, args: list[str]) -> Any:
    """Return an error that shows how to translate PFLlib's flags; None if there are none."""
    from fedloom.cli.pfllib import is_pfllib_flag

    found = [] if error.option_name.startswith("--") else [text for text in args if is_pfllib_flag(text)]
    text = f"No such option: {found[0]}. " if found else ""
    return UsageError(f"{text}For PFLlib's flags: fedloom migrate {shlex.join(args)}", error.ctx) if found else None


class Application(typer.Typer):
    """The application, whose commands are of the class `Command`."""

    def command(self, *arguments: Any, **options: Any) -> Any:
        """Return a decorator that adds a command."""
        return super().command(*arguments, **{"cls": Command} | options)


class Commands(Group):
    """The group of all commands. Python files named on the command line (`--method mine.py:Mine`) may be imported."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Allow importing the files that the arguments name, until the command ends."""
        # An argument that is an existing path may come from a shell's `folder/*`, so it was not necessarily typed.
        typed = [text for text in args if not os.path.lexists(text)]
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            ctx.with_resource(trusted_code.scope())
            trusted_code.allow(typed)
        return rest


app = Application(
    cls=Commands,
    help="Personalised, representation-based federated learning.\n\nStart with: fedloom compare demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"fedloom {version('fedloom')}\n")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


out = Console()
err = Console(stderr=True)


def join_help_lines(commands: typer.Typer) -> None:
    """Join the lines of each help paragraph, so that it wraps at the terminal's width instead of the source's."""
    for command in commands.registered_commands:
        paragraphs = cleandoc((command.callback and command.callback.__doc__) or "").split("\n\n")
        command.help = "\n\n".join(text.replace("\n", " ") for text in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance:
            join_help_lines(group.typer_instance)


def say(text: str, where: Console = out) -> None:
    """Print plain text and flush, with control characters escaped; the terminal wraps it."""
    where.print(printable(text), highlight=False, markup=False, soft_wrap=True)
    where.file.flush()


def show_json(value: Any) -> None:
    """Print a value as one line of JSON on stdout."""
    from fedloom.core.reading import without_nan

    sys.stdout.write(json.dumps(without_nan(value)) + "\n")


def loading() -> None:
    """Print the first line of a command that trains or predicts, before it imports torch."""
    say(f"fedloom {version('fedloom')}: loading", err)


@contextmanager
def showing_progress() -> Iterator[Any]:
    """Yield a function that shows the progress of a run; print how to resume a run that is stopped."""
    from fedloom.core.registry import short
    from fedloom.report.progress import RunProgress

    shown: list[RunProgress] = []
    hints = _Hints(logging.INFO)
    _printed.clear()
    logger = logging.getLogger("fedloom.engines")
    level = logger.level

    def start(recipe: "Recipe", title: str | None = None) -> RunProgress:
        for progress in shown:
            progress.stop()
        title = title or f"{short(recipe.method.name)} (seed {recipe.seed})"
        shown.append(RunProgress(title, recipe.training.rounds, err))
        return shown[-1]

    logger.addHandler(hints)
    logger.setLevel(logging.INFO)
    try:
        yield start
    except Interrupted as stopped:
        for progress in shown:
            progress.stop()
        say(str(stopped), err)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        logger.removeHandler(hints)
        logger.setLevel(level)
        for progress in shown:
            progress.stop()


_printed: set[str] = set()
"""Notes that the command has printed: a run's notes are printed when it starts, and are in its summary too."""


def _say_once(note: str, prefix: str = "") -> None:
    if note not in _printed:
        _printed.add(note)
        say(prefix + note, err)


class _Hints(logging.Handler):
    """Log handler that prints the settings that the engine chose; warnings have another handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            _say_once(record.getMessage())


def show(summaries: "list[Summary]", as_json: bool, value: Mapping[str, Any], title: str = "") -> None:
    """Print the summaries as a table with the run folder, or as JSON."""
    from fedloom.report.table import comparison_table, figures_table, newcomers_table

    for summary in summaries:
        for note in summary["notes"]:
            _say_once(note, "note: ")
    if as_json:
        show_json(value)
        return
    out.print(comparison_table(summaries, title))
    if (figures := figures_table(summaries)) is not None:
        out.print(figures)
    if (newcomers := value.get("newcomers")) is not None:
        title = f"{newcomers['newcomers']} newcomers: {newcomers['head']} on a frozen representation"
        out.print(newcomers_table(newcomers["rows"], title))
    if "report" in value:
        say(f"report: {value['report']}")
    say(f"run folder: {value['run_dir']}")
