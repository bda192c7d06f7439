"""`fedloom`, also as `python -m fedloom`."""

from contextlib import suppress

from fedloom.cli.completion import outline
from fedloom.core.signals import follow, follows


def main() -> None:
    """The command line; help and what a shell asks for at Tab are told without loading it, but for the first time."""
    if follows():
        follow()
    wanted = outline.enough()
    if wanted and (app := outline.kept()):
        with suppress(outline.MoreIsWanted):
            app()
            return
        wanted = False
    from fedloom import cli

    if wanted:
        outline.keep(cli.app)
    cli.main()


if __name__ == "__main__":
    main()
