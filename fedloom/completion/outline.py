"""The commands without what they do, kept in a file: Tab answers out of it, and need not wait for torch.

It is made by the first Tab, and again when the command line or what is installed has changed.
"""

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

VARIABLE = "_FEDLOOM_COMPLETE"
"""Set by the shell when it asks for completions."""
GROUPS = ("fedloom.methods", "fedloom.models", "fedloom.datasets", "fedloom.objectives")


def asked() -> bool:
    """Whether a shell wants completions (and not the script that asks for them)."""
    return os.environ.get(VARIABLE, "").startswith("complete")


def answered() -> bool:
    """Prints what a shell asks for, if there is an outline to tell it from."""
    try:
        outline = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    from typer._completion_classes import completion_init
    from typer.completion import shell_complete

    completion_init()
    shell_complete(_command("fedloom", outline), {}, "fedloom", VARIABLE, os.environ[VARIABLE])
    return True


def keep(command: Any) -> None:
    """Writes the outline of a command, so that the next Tab is fast; older ones go."""
    file = _file()
    with suppress(OSError):  # no place for it is no reason to fail
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("completion-*.json"):
            old.unlink()
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(_outline(command)), encoding="utf-8")
        own.replace(file)


def _file() -> Path:
    """Its name tells what it was made of."""
    package = Path(__file__).parent
    made_of: list[object] = [version("typer"), str(package)]
    for folder in ("cli", "recipes", "methods", "models", "engines", "data/sources"):
        made_of += sorted((str(file), file.stat().st_mtime_ns) for file in (package / folder).rglob("*.[py]*"))
    made_of += sorted((entry.group, entry.name) for group in GROUPS for entry in entry_points(group=group))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fedloom" / f"completion-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.json"


def _outline(command: Any) -> dict[str, Any]:
    import click

    context = click.Context(command)
    return {
        "help": command.get_short_help_str(),
        "parameters": [
            {
                "names": parameter.opts + parameter.secondary_opts,
                "option": isinstance(parameter, click.Option),
                "flag": getattr(parameter, "is_flag", False),
                "multiple": parameter.multiple or parameter.nargs != 1,
                "help": getattr(parameter, "help", None),
                "offers": [item.value for item in parameter.shell_complete(context, "") if item.type == "plain"],
            }
            for parameter in command.get_params(context)
        ],
        "commands": {name: _outline(inner) for name, inner in sorted(getattr(command, "commands", {}).items())},
    }


def _command(name: str, outline: dict[str, Any]) -> Any:
    import click

    inner = {each: _command(each, told) for each, told in outline["commands"].items()}
    parameters = [_parameter(click, told) for told in outline["parameters"]]
    if inner:
        return click.Group(name, commands=inner, params=parameters, short_help=outline["help"])
    return click.Command(name, params=parameters, short_help=outline["help"])


def _parameter(click: Any, told: dict[str, Any]) -> Any:
    from click.shell_completion import CompletionItem

    from fedloom.completion.offers import matching

    def complete(context: Any, parameter: Any, incomplete: str) -> list[Any]:
        return [CompletionItem(value) for value in matching(told["offers"], incomplete)]

    if told["option"]:
        kind = {"is_flag": True} if told["flag"] else {"multiple": told["multiple"], "shell_complete": complete}
        return click.Option(told["names"], help=told["help"], **kind)
    return click.Argument(told["names"], required=False, nargs=-1 if told["multiple"] else 1, shell_complete=complete)
