"""Reading of untrusted files: within the free memory and validated against a schema.

Every failure is a UserError that names the file, the field and the remedy. JSON is parsed directly into TypedDicts and
dataclasses.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedloom.core.checking import field_remedy
from fedloom.core.errors import UserError, brief, shown
from fedloom.core.limits import refuse_without_room

Read = TypeVar("Read")
CHECKED = ConfigDict(extra="allow", allow_inf_nan=False)
"""Configuration of TypedDicts read from files: numbers are finite; fields written by other versions are kept."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A non-negative integer that floats represent exactly."""
CHUNK = 2**20
"""Bytes to read at a time, because the reported file size may be wrong."""
JSON_COST = 40
"""Bytes of memory that one byte of JSON can take: `[],` becomes a list of 56 bytes and a reference."""


@contextmanager
def decoding(path: object, what: str, remedy: str) -> Iterator[None]:
    """Convert every exception of a decoder to a UserError: damaged files can raise nearly any exception."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"{path}: not enough memory to read it as {what}; {remedy}") from None
    except Exception as error:
        raise UserError(f"{path}: cannot be read as {what} ({brief(error)}); {remedy}") from error


def read_bytes(path: Path, what: str, remedy: str, most: int | None = None) -> bytes:
    """Return a file's content.

    Args:
        path: The file.
        what: The expected format, for error messages.
        remedy: What the user can do about an unusable file; end of the error message.
        most: Maximum number of bytes.

    Raises:
        UserError: The file cannot be opened, or is too large.
    """
    with decoding(path, what, remedy), path.open("rb") as file:
        size = path.stat().st_size
        refuse_without_room(size, str(path), remedy, "it")
        data = bytearray()
        while chunk := file.read(CHUNK):
            data += chunk
            if most is not None and len(data) > most:
                raise UserError(f"{path}: has more than {most:,} bytes, which is too many for {what}; {remedy}")
        return bytes(data)


def read_json(path: Path, kind: type[Read], remedy: str, required: Collection[str] = ()) -> Read:
    """Read a JSON file as a value of a type.

    Args:
        path: The file.
        kind: A TypedDict, a dataclass, or any other type that pydantic supports.
        remedy: What the user can do about an unusable file; end of the error message.
        required: Fields that must be present although the type does not require them.

    Raises:
        UserError: The file cannot be read, or its content does not match the type.
    """
    return parse_json(_json_bytes(path, remedy), kind, f"'{path}'", remedy, required)


def read_lines(path: Path, kind: type[Read], remedy: str, required: Collection[str] = ()) -> list[Read]:
    """Read a file of JSON lines. A missing file is empty; an incomplete last line is ignored."""
    if not path.exists():
        return []
    whole, _, _ = _json_bytes(path, remedy).rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    return [parse_json(line, kind, f"'{path}', line {i}", remedy, required) for i, line in enumerate(lines, 1)]


def _json_bytes(path: Path, remedy: str) -> bytes:
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a file; {remedy}")
    with decoding(f"'{path}'", "JSON", remedy):
        refuse_without_room(JSON_COST * path.stat().st_size, f"'{path}'", remedy, "it")
    return read_bytes(path, "JSON", remedy)


def parse_json(data: bytes, kind: type[Read], where: str, remedy: str, required: Collection[str] = ()) -> Read:
    """Parse JSON as a value of a type; `where` is the start of the UserError's message."""
    try:
        found = _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None
    if missing := [name for name in required if isinstance(found, dict) and name not in found]:
        raise UserError(f"{where} cannot be used: {missing[0]} is missing; {remedy}")
    return found


def conforming(value: Any, kind: type[Read], where: str, remedy: str) -> Read:
    """Return a parsed JSON value unchanged if it matches a type; `where` is the start of the UserError's message."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None
    return cast(Read, value)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: type[Read]) -> TypeAdapter[Read]:
    """Return a cached TypeAdapter: creating one takes milliseconds."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _refusal(error: ValidationError, where: str, remedy: str) -> UserError:
    """Return a UserError for the first validation error: field, value, remedy."""
    first: Any = error.errors(include_url=False)[0]
    field = ".".join(str(part)[:40] for part in first["loc"])
    if first["type"] == "json_invalid":
        why = f"it is not JSON ({brief(ValueError(first['ctx']['error']))})"
    elif first["type"] == "missing":
        why = f"{field} is missing"
    else:
        why = f"{f'{field} = ' if field else ''}{shown(first['input'])}: {field_remedy(first)}"
    return UserError(f"{where} cannot be used: {why}; {remedy}")
