"""Arrays out of files and archives, read in bounded memory: sizes are checked before anything is allocated.

A declared size may be false, so exactly as many bytes are read as it says, a chunk at a time, and a file that has fewer
or more is refused.
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
"""Kinds of types that hold no Python objects: truth values, numbers, texts."""
HEADER = 10_000
"""Bytes of the header of an array, at most."""


class TooShortError(EOFError):
    """A stream that has fewer bytes than were declared."""


def exactly(stream: IO[bytes], count: int) -> bytes:
    """The next `count` bytes.

    Raises:
        TooShortError: There are fewer.
    """
    parts, left = [], count
    while left:
        part = stream.read(min(left, CHUNK))
        if not part:
            raise TooShortError(f"it ends {left} bytes too early")
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def fill(stream: IO[bytes], target: np.ndarray, dtype: np.dtype) -> None:
    """Reads an array in C order into `target`, which may be a view in another order; few rows are in memory twice."""
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
    """What an archive says of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    """Whether the first index runs fastest."""

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.dtype.itemsize


class Archive:
    """The arrays of an `.npz` file. Headers can be asked for before anything is read; arrays of objects never are."""

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
        """Of its arrays."""
        return sorted(self._members)

    def header(self, key: str) -> Header:
        """Shape and type of an array, compared with the size of its entry in the archive."""
        with self._open(key) as stream:
            return self._header(key, stream)

    def refuse_without_room(self, keys: Iterable[str], copies: int = 1) -> None:
        """Raises a UserError unless there is memory for these arrays."""
        for key in keys:
            header = self.header(key)
            what = f"{self.path}: {key} of shape {list(header.shape)}"
            refuse_without_room(copies * header.size, what, "leave out images, or make them smaller", "it")

    def read(self, key: str) -> np.ndarray:
        """An array as it was saved."""
        header = self.header(key)
        self.refuse_without_room([key])
        array = np.empty(header.shape, header.dtype)
        self.read_into(key, array)
        return array

    def read_into(self, key: str, target: np.ndarray) -> None:
        """An array's values into a target of the same shape, or a view of it."""
        with self._open(key) as stream:
            header = self._header(key, stream)
            fill(stream, target.T if header.fortran else target, header.dtype)
            if stream.read(1):  # reads to the end, where the checksum is compared
                raise ValueError(f"{key} has more values than its shape {list(header.shape)}")

    def _open(self, key: str) -> IO[bytes]:
        info = self._members[key]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{key} is compressed by a method that NumPy does not use")
        return self._zip.open(info)

    def _header(self, key: str, stream: IO[bytes]) -> Header:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{key} has version {version[0]}.{version[1]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=HEADER)
        if dtype.kind not in PLAIN or dtype.itemsize == 0:
            raise UserError(
                f"{self.path}: {key} cannot be read: {dtype} is not one of the plain arrays (numbers or texts)"
            )
        if not all(type(size) is int and 0 <= size < 2**48 for size in shape) or len(shape) > 8:
            raise ValueError(f"{key} has the impossible shape {shape!s:.80}")
        header = Header(shape, dtype, fortran)
        left = self._members[key].file_size - stream.tell()
        if header.size != left:
            raise UserError(
                f"{self.path}: {key} declares {header.size:,} bytes (shape {list(shape)}), but has {left:,}; "
                "save the archive again"
            )
        return header
