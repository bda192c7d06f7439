"""Reads files that others wrote: within the free memory, against a schema, every failure one UserError.

The message of such an error names the file, the field and the remedy. JSON is read straight into the TypedDicts and
dataclasses that the rest of the code works with.
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
"""For TypedDicts that are read from files: numbers are finite; what another version wrote besides is kept."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A whole number that is not negative and that floats hold exactly."""
CHUNK = 2**20
"""Bytes that are read at a time where a size is not known to be true."""
JSON_COST = 40
"""Bytes that a byte of JSON can become in memory: `[],` is a list of 56 bytes and a reference."""


@contextmanager
def decoding(path: object, what: str, remedy: str) -> Iterator[None]:
    """Turns whatever a decoder raises into a UserError. Damaged files make decoders fail with nearly any exception."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"{path}: there is not enough memory to read it as {what}; {remedy}") from None
    except Exception as error:
        raise UserError(f"{path}: cannot be read as {what} ({brief(error)}); {remedy}") from error


def read_bytes(path: Path, what: str, remedy: str, most: int | None = None) -> bytes:
    """A file's content. One of more than `most` bytes, or than there is room for, is refused.

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
                raise UserError(f"{path}: has more than {most:,} bytes, too many for {what}; {remedy}")
        return bytes(data)


def read_json(path: Path, kind: type[Read], remedy: str, required: Collection[str] = ()) -> Read:
    """A JSON file as a value of this type.

    Args:
        path: The file.
        kind: A TypedDict, a dataclass, or any other type that pydantic knows.
        remedy: What the user can do about a file that cannot be used; ends the message.
        required: Fields that must be there although the type does not ask for them.

    Raises:
        UserError: It cannot be read, or is of another form.
    """
    return parse_json(_json_bytes(path, remedy), kind, f"'{path}'", remedy, required)


def read_lines(path: Path, kind: type[Read], remedy: str, required: Collection[str] = ()) -> list[Read]:
    """The JSON lines of a file, none if it is missing; a last line that is still being written does not count."""
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
    """JSON as a value of this type; `where` begins the message of a UserError."""
    try:
        found = _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise _refusal(error, where, remedy) from None
    if missing := [name for name in required if isinstance(found, dict) and name not in found]:
        raise UserError(f"{where} cannot be used: {missing[0]} is missing; {remedy}")
    return found


def conforming(value: Any, kind: type[Read], where: str, remedy: str) -> Read:
    """A value out of JSON, as it is, if it is one of this type; `where` begins the message of a UserError."""
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
    """Made once for each type: it takes milliseconds."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _refusal(error: ValidationError, where: str, remedy: str) -> UserError:
    """The first thing that is wrong, as field, value and remedy."""
    first: Any = error.errors(include_url=False)[0]
    field = ".".join(str(part)[:40] for part in first["loc"])
    if first["type"] == "json_invalid":
        why = f"it is not JSON ({brief(ValueError(first['ctx']['error']))})"
    elif first["type"] == "missing":
        why = f"{field} is missing"
    else:
        why = f"{f'{field} = ' if field else ''}{shown(first['input'])}: {field_remedy(first)}"
    return UserError(f"{where} cannot be used: {why}; {remedy}")
