"""`fedloom`, also as `python -m fedloom`."""

from fedloom.completion import outline


def main() -> None:
    """The command line; help and what a shell asks for at Tab are told without loading it, but for the first time."""
    if outline.enough():
        app = outline.kept()
        if app is None:
            from fedloom import cli

            outline.keep(cli.app)
            app = outline.kept() or cli.app
        app()
        return
    from fedloom import cli

    cli.main()


if __name__ == "__main__":
    main()
