"""The command line: a file per group of commands."""

import sys
from contextlib import suppress

from fedloom.cli.completion import offers, outline
from fedloom.core.errors import RunError, UserError
from fedloom.core.signals import follow, follows


def main() -> None:
    """Entry point of `fedloom`. Exit code 2 after a user's mistake, 1 after a run that cannot continue.

    Help and completions come from a stored outline of the commands, which does not import torch.
    """
    if follows():
        follow()
    wanted = outline.enough()
    if wanted and (stored := outline.kept()):
        with suppress(offers.MoreIsWanted):
            stored()
            return
        wanted = False
    from fedloom.cli.commands import app

    if wanted:
        outline.keep(app)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except (UserError, RunError) as error:
        if debug:
            raise
        _show(error)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _show(error: UserError | RunError) -> None:
    from rich.markup import escape

    from fedloom.cli.base import err

    err.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
    for note in getattr(error, "__notes__", []):
        err.print(note, highlight=False, markup=False, soft_wrap=True)
