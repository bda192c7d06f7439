"""Checks values against a pydantic model and says what is wrong in our words: field, value, remedy."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from fedloom.core.errors import UserError, nearest, shown

Checked = TypeVar("Checked", bound=BaseModel)


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def checked(kind: type[Checked], values: Any, path: str = "") -> Checked:
    """The values as this part of a recipe, or all that is wrong with them, a sentence each."""
    try:
        section = kind.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(kind, e, path) for e in error.errors())) from None
    if misread := list(_misread(values, section, path)):
        raise UserError("\n".join(misread))
    return section


def as_written(parse: Callable[[Any], object]) -> AfterValidator:
    """Keeps a field as it was written, once it has been parsed without complaint."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


def refusal(sentence: str) -> PydanticCustomError:
    """A complaint that names its field itself; pydantic collects it with the others."""
    return PydanticCustomError("refusal", "{sentence}", {"sentence": sentence})


def _sentence(kind: type[BaseModel], error: Any, path: str) -> str:
    """What pydantic found, in our words: field, value, remedy."""
    if error["type"] == "refusal":
        return str(error["msg"])
    field = ".".join(str(part) for part in (path, *error["loc"]) if part != "")
    if error["type"] in ("extra_forbidden", "invalid_key"):
        if error["loc"] == ("compare",):
            return "compare: this recipe describes a comparison of methods; run it with `fedloom compare`"
        if error["loc"] == ("sweep",):
            return "sweep: this recipe describes a sweep over settings; run it with `fedloom sweep`"
        value = "" if error["type"] == "invalid_key" else f" = {shown(error['input'])}"
        return f"{field}{value}: there is no such field; {nearest(error['loc'][-1], _fields(kind, error['loc'][:-1]))}"
    cause = error.get("ctx", {}).get("error")
    if cause is None:
        return f"{field} = {shown(error['input'])}: {_remedy(kind, error)}"
    if str(cause).startswith(f"{field} = "):
        return str(cause)
    value = shown(error["input"])
    message = str(cause).removeprefix(f"{error['loc'][-1]} {value}: ")
    return f"{field}: {message}" if value in message else f"{field} = {value}: {message}"


_BOUNDS = {"greater_than_equal": "at least {ge:g}", "greater_than": "above {gt:g}",
           "less_than_equal": "at most {le:g}", "less_than": "below {lt:g}"}  # fmt: skip
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "path": "a path",
          "tuple": "a list, such as [a, b]", "list": "a list", "dict": "a mapping"}  # fmt: skip


def _remedy(kind: type[BaseModel], error: Any) -> str:
    """What a value should have been, by pydantic's name of the error."""
    what, context = error["type"], error.get("ctx", {})
    if what == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"is unknown; {nearest(error['input'], choices)}"
    if what == "model_type":
        fields = _fields(kind, error["loc"])
        return f"must be {'a name or ' if 'name' in fields else ''}a section with the fields {', '.join(fields)}"
    return field_remedy(error)


def field_remedy(error: Any) -> str:
    """What a value should have been, where that does not depend on the section it is in."""
    what, context = error["type"], error.get("ctx", {})
    if what in _BOUNDS:
        return f"must be {_BOUNDS[what].format(**context)}"
    if what == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if what in ("too_short", "too_long"):
        return f"must have {context.get('min_length', context.get('max_length'))} entries"
    word = _KINDS.get(what.split("_")[0])
    return f"must be {word}" if word else str(error["msg"])


def _misread(values: Any, section: Any, path: str) -> Iterator[str]:
    """Values that pydantic takes and nobody means: true as the number 1, infinity, not a number."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        field = f"{path}.{name}".lstrip(".")
        read = section.get(name) if isinstance(section, Mapping) else getattr(section, str(name), None)
        if isinstance(value, Mapping):
            yield from _misread(value, read, field)
        elif isinstance(value, bool) and not isinstance(read, bool):
            yield f"{field} = {shown(value)}: must be a number, not a switch"
        elif isinstance(read, float) and not math.isfinite(read):
            yield f"{field} = {shown(value)}: must be a finite number"


def _fields(kind: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Names of the fields of a section."""
    section: Any = kind
    for name in path:
        section = section.model_fields[name].annotation
        section = next((choice for choice in get_args(section) if choice is not type(None)), section)  # A | None
    return list(section.model_fields)
