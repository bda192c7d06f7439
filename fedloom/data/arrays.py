"""Reader of arrays in files and `.npz` archives, in bounded memory: sizes are checked before memory is allocated.

A declared size may be wrong. Exactly the declared number of bytes is read, in chunks, and a file with fewer or more
bytes is rejected.
"""

import math
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import CHUNK

PLAIN = "biufUS"
"""NumPy type kinds without Python objects: booleans, numbers, strings."""
HEADER = 10_000
"""Maximum size of an array's header, in bytes."""


class TooShortError(EOFError):
    """A stream ends before the declared number of bytes."""


def exactly(stream: IO[bytes], count: int) -> bytes:
    """Read exactly `count` bytes.

    Raises:
        TooShortError: The stream has fewer bytes.
    """
    parts, left = [], count
    while left:
        part = stream.read(min(left, CHUNK))
        if not part:
            raise TooShortError(f"the file ends {left} bytes too early")
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def fill(stream: IO[bytes], target: np.ndarray, dtype: np.dtype) -> None:
    """Read an array in C order into `target`, which may be a view in another order, a few rows at a time."""
    if target.ndim == 0:
        target = target.reshape(1)
    row = math.prod(target.shape[1:]) * dtype.itemsize
    step = max(1, CHUNK // max(1, row))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        data = exactly(stream, part.size * dtype.itemsize)
        part[...] = np.frombuffer(data, dtype).reshape(part.shape)


@dataclass(frozen=True)
class Header:
    """Shape and type of an array, as declared in an archive."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    """Whether the array is in Fortran order: the first index varies fastest."""

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


class Archive:
    """The arrays of an `.npz` file, with headers that can be read before the data. Object arrays are never loaded."""

    def __init__(self, path: Path):
        self.path = path
        self._zip = zipfile.ZipFile(path)
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}

    def __enter__(self) -> "Archive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def __contains__(self, key: object) -> bool:
        return key in self._members

    @property
    def names(self) -> list[str]:
        """Names of the arrays, sorted."""
        return sorted(self._members)

    def header(self, key: str) -> Header:
        """Return shape and type of an array, after a check against the size of its entry in the archive."""
        with self._open(key) as stream:
            return self._header(key, stream)

    def refuse_without_room(self, keys: Iterable[str], copies: int = 1) -> None:
        """Raise a UserError unless there is memory for these arrays."""
        for key in keys:
            header = self.header(key)
            what = f"{self.path}: {key} of shape {list(header.shape)}"
            refuse_without_room(copies * header.size, what, "leave out images, or make them smaller", "it")

    def read(self, key: str) -> np.ndarray:
        """Return an array."""
        header = self.header(key)
        self.refuse_without_room([key])
        array = np.empty(header.shape, header.dtype)
        self.read_into(key, array)
        return array

    def read_into(self, key: str, target: np.ndarray) -> None:
        """Read an array into a target of the same shape, which may be a view."""
        with self._open(key) as stream:
            header = self._header(key, stream)
            fill(stream, target.T if header.fortran else target, header.dtype)
            if stream.read(1):  # reads to the end, where zipfile verifies the checksum
                raise ValueError(f"{key} has more values than its shape {list(header.shape)}")

    def _open(self, key: str) -> IO[bytes]:
        info = self._members[key]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{key} is compressed with a method that NumPy does not use")
        return self._zip.open(info)

    def _header(self, key: str, stream: IO[bytes]) -> Header:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{key} has the unsupported format version {version[0]}.{version[1]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=HEADER)
        if dtype.kind not in PLAIN or dtype.itemsize == 0:
            raise UserError(
                f"{self.path}: {key} cannot be read: {dtype} is not a type of plain arrays (numbers or strings)"
            )
        if not all(type(size) is int and 0 <= size < 2**48 for size in shape) or len(shape) > 8:
            raise ValueError(f"{key} has the invalid shape {shape!s:.80}")
        header = Header(shape, dtype, fortran)
        left = self._members[key].file_size - stream.tell()
        if header.size != left:
            raise UserError(
                f"{self.path}: {key} declares {header.size:,} bytes (shape {list(shape)}), but has {left:,}; "
                "save the archive again"
            )
        return header
