"""The command line as JSON, and back: commands that know their flags and help texts and do nothing.

Both ways go through what typer makes public, so that they work with every typer: on click, or on its own.
"""

from collections.abc import Callable
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.main import get_command
from typer.models import CommandInfo, OptionInfo

from fedloom.cli.completion.offers import MoreIsWanted, matching

TYPES = {kind.__name__: kind for kind in (str, int, float, bool, Path)}
TOLD = ("help", "metavar", "min", "max", "show_default")
"""What is said of a flag besides its names, type and default."""


def outline_of(app: typer.Typer) -> dict[str, Any]:
    """Everything that help and completion need to know."""
    return _group(app, get_command(app))


def app_of(outline: dict[str, Any]) -> typer.Typer:
    """Commands that can be asked for help and completions."""
    app = typer.Typer(**outline["settings"])
    for told in outline["commands"]:
        app.command(told["name"], help=told["help"])(_does_nothing([_parameter(one) for one in told["parameters"]]))
    for name, group in outline["groups"].items():
        app.add_typer(app_of(group), name=name)
    return app


def _group(app: typer.Typer, known: Any) -> dict[str, Any]:
    settings = {name: getattr(app.info, name, None) for name in ("help", "no_args_is_help")}
    settings |= {name: getattr(app, name) for name in ("rich_markup_mode", "pretty_exceptions_enable")}
    groups = {str(info.name): info.typer_instance for info in app.registered_groups}
    return {
        "settings": settings,
        "commands": [_command(info, known) for info in app.registered_commands],
        "groups": {name: _group(inner, known.commands[name]) for name, inner in groups.items() if inner},
    }


def _command(info: CommandInfo, known: Any) -> dict[str, Any]:
    assert info.callback is not None
    command = known.commands[info.name or info.callback.__name__.replace("_", "-")]
    hints = get_type_hints(info.callback, include_extras=True)
    offers = {one.name: _offers(one, command) for one in command.params}
    return {
        "name": command.name,
        "help": info.help or info.callback.__doc__,
        "parameters": [
            _told(name, hints[name], one.default) | {"offers": offers[name]}
            for name, one in signature(info.callback).parameters.items()
        ],
    }


def _offers(parameter: Any, command: Any) -> list[str]:
    found = parameter.shell_complete(typer.Context(command), "")
    return [item.value for item in found if item.type == "plain"]


def _told(name: str, hint: Any, default: Any) -> dict[str, Any]:
    kind, info = get_args(hint)[:2]
    optional = type(None) in get_args(kind)
    kind = next(one for one in get_args(kind) if one is not type(None)) if optional else kind
    many = get_origin(kind) is list
    kind = get_args(kind)[0] if many else kind
    choices = list(kind) if issubclass(kind, StrEnum) else None
    return {
        "name": name,
        "option": isinstance(info, OptionInfo),
        "names": [
            one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)
        ],  # default: the first
        "type": "str" if choices else kind.__name__,
        "choices": choices,
        "many": many,
        "optional": optional,
        "required": default is Parameter.empty,
        "default": None if default is Parameter.empty else default,
        "told": {key: getattr(info, key) for key in TOLD},
    }


def _parameter(told: dict[str, Any]) -> Parameter:
    kind: Any = TYPES[told["type"]]
    more = dict(told["told"])
    if told["choices"]:
        kind = _one_of(told["choices"])
    elif kind is not bool:
        more["autocompletion"] = _completing(told["offers"])
    kind = list[kind] if told["many"] else kind
    kind = kind | None if told["optional"] else kind
    info = typer.Option(*told["names"], **more) if told["option"] else typer.Argument(**more)
    default = Parameter.empty if told["required"] else told["default"]
    return Parameter(told["name"], Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _one_of(choices: list[str]) -> Any:
    return StrEnum("Choice", {value: value for value in choices})


def _completing(offers: list[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return matching(offers, incomplete)

    return complete


def _does_nothing(parameters: list[Parameter]) -> Callable[..., None]:
    def command(**given: Any) -> None:
        raise MoreIsWanted

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command
