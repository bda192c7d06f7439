"""`fedloom`, also as `python -m fedloom`."""

from fedloom.completion import outline


def main() -> None:
    """The command line; what a shell asks for at Tab is answered without loading it, but for the first time."""
    if outline.asked() and outline.answered():
        return
    from typer.main import get_command

    from fedloom import cli

    if outline.asked():
        outline.keep(get_command(cli.app))
        if outline.answered():
            return
    cli.main()


if __name__ == "__main__":
    main()
