"""The commands without what they do, kept in a file: Tab and --help are answered out of it, and do not wait for torch.

It is made when it is first needed, and again when the command line or what is installed has changed.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

VARIABLE = "_FEDLOOM_COMPLETE"
"""Set by the shell when it asks for completions."""
FLAGS = {"--help", "--show-completion", "--install-completion"}
GROUPS = ("fedloom.methods", "fedloom.models", "fedloom.datasets", "fedloom.objectives")
PACKAGE = Path(__file__).parents[2]
FOLDERS = ("cli", "studies/recipes", "methods", "models", "objectives", "engines", "data", "inference")
"""Where commands, their flags and the names that they offer come from."""


def enough() -> bool:
    """Whether the outline should be all it takes: a shell wants completions, or somebody help."""
    return (
        VARIABLE in os.environ or len(sys.argv) == 1 or (not FLAGS.isdisjoint(sys.argv) and "--debug" not in sys.argv)
    )


def kept() -> "typer.Typer | None":
    """The commands of the outline, if there is one."""
    try:
        outline = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    from fedloom.cli.completion.commands import app_of

    return app_of(outline)


def keep(app: "typer.Typer") -> None:
    """Writes the outline of the commands, so that the next time is fast; older ones go."""
    from fedloom.cli.completion.commands import outline_of

    file, outline = _file(), json.dumps(outline_of(app), default=str)
    with suppress(OSError):  # no place for it is no reason to fail
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("completion-*.json"):
            old.unlink()
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(outline, encoding="utf-8")
        own.replace(file)


def _file() -> Path:
    """Its name tells what it was made of."""
    made_of: list[object] = [version("typer"), str(PACKAGE)]
    for folder in FOLDERS:
        found = [file for ending in ("*.py", "*.yaml") for file in (PACKAGE / folder).rglob(ending)]
        made_of += sorted((str(file), file.stat().st_mtime_ns) for file in found)
    made_of += sorted((entry.group, entry.name) for group in GROUPS for entry in entry_points(group=group))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fedloom" / f"completion-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.json"
