"""Validation against pydantic models, with error messages of the form field, value, remedy."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from fedloom.core.errors import UserError, nearest, shown

Checked = TypeVar("Checked", bound=BaseModel)


class Section(BaseModel):
    """Base class of the sections of a recipe. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def expand_name(default: str | None = None) -> Callable[[Any], Any]:
    """Return a validator that expands a section in short form (its name) and fills in a missing name."""

    def read(value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        return {"name": default} | dict(value) if default and isinstance(value, Mapping) else value

    return read


class Named(BaseModel):
    """A registered name and its options: `{name: fedprox, mu: 0.1}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Options by name, without `name`."""
        return dict(self.model_extra or {})


def checked(kind: type[Checked], values: Any, path: str = "") -> Checked:
    """Validate values as a section of a recipe.

    Args:
        kind: The section's class.
        values: The values, usually a mapping read from YAML.
        path: The section's name in error messages, such as `training`.

    Raises:
        UserError: Lists all invalid fields, one per line.
    """
    try:
        section = kind.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(kind, e, path) for e in error.errors())) from None
    if misread := list(_misread(values, section, path)):
        raise UserError("\n".join(misread))
    return section


def as_written(parse: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that keeps a field's original value if `parse` accepts it."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


def refusal(sentence: str) -> PydanticCustomError:
    """Return an error whose message already names its field, for use in pydantic validators."""
    return PydanticCustomError("refusal", "{sentence}", {"sentence": sentence})


def _sentence(kind: type[BaseModel], error: Any, path: str) -> str:
    """Return one pydantic error as text: field, value, remedy."""
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
    """Return the values that are valid, given pydantic's error type."""
    what, context = error["type"], error.get("ctx", {})
    if what == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"]) or re.findall(r"\d+", context["expected"])
        return f"is unknown; {nearest(error['input'], choices)}"
    if what == "model_type":
        fields = _fields(kind, error["loc"])
        return f"must be {'a name or ' if 'name' in fields else ''}a section with the fields {', '.join(fields)}"
    return field_remedy(error)


def field_remedy(error: Any) -> str:
    """Return the values that are valid, for errors that do not depend on the enclosing section."""
    what, context = error["type"], error.get("ctx", {})
    if what in _BOUNDS:
        return f"must be {_BOUNDS[what].format(**context)}"
    if what == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if what in ("too_short", "too_long"):
        bound = "at least" if what == "too_short" else "at most"
        count = context.get("min_length", context.get("max_length"))
        return f"must have {bound} {count} {'entry' if count == 1 else 'entries'}"
    if what == "tuple_type" and isinstance(error["input"], str):
        return f"must be a list, such as [{shown(error['input'])[1:-1]}]"
    word = _KINDS.get(what.split("_")[0])
    return f"must be {word}" if word else str(error["msg"])


def _misread(values: Any, section: Any, path: str) -> Iterator[str]:
    """Yield errors for values that pydantic accepts but that are mistakes: booleans as numbers, infinity, NaN."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        field = f"{path}.{name}".lstrip(".")
        read = section.get(name) if isinstance(section, Mapping) else getattr(section, str(name), None)
        if isinstance(value, Mapping):
            yield from _misread(value, read, field)
        elif isinstance(value, bool) and not isinstance(read, bool):
            yield f"{field} = {shown(value)}: must be a number, not true or false"
        elif isinstance(read, float) and not math.isfinite(read):
            yield f"{field} = {shown(value)}: must be a finite number"


def _fields(kind: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Return the names of the fields of a section."""
    section: Any = kind
    for name in path:
        inside = hasattr(section, "model_fields")
        section = section.model_fields[name].annotation if inside else _element(section)
        if get_origin(section) is Annotated:
            section = get_args(section)[0]
        if get_origin(section) in (Union, UnionType):  # A | None
            section = next(choice for choice in get_args(section) if choice is not type(None))
    return list(section.model_fields)


def _element(container: Any) -> Any:
    """Return the type of the elements of `tuple[A, ...]`, `list[A]` or `dict[str, A]`."""
    return [kind for kind in get_args(container) if kind is not Ellipsis][-1]
