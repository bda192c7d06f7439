"""The command line: a file per group of commands; importing one adds its commands."""

import sys

from rich.markup import escape

from fedloom.cli import deploy, look, new, report, reproduce, run, sweep, use
from fedloom.cli.base import app, err, flow
from fedloom.core.errors import RunError, UserError

__all__ = ["app", "deploy", "look", "main", "new", "report", "reproduce", "run", "sweep", "use"]

flow(app)


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
