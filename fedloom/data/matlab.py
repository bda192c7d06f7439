"""Reader of numeric arrays in MATLAB files (version 5, the format of SVHN), in bounded memory.

SciPy's reader allocates any size that a file declares. This one first compares every declared size with the bytes in
the file.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import CHUNK
from fedloom.data.arrays import exactly

MATRIX, COMPRESSED = 14, 15
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Stored type of an array's values, by the number in its tag."""
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""Type of an array, by the number of its MATLAB class."""
VARIABLES = 100  # maximum number of variables in a file


def read_arrays(file: IO[bytes], size: int, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the numeric arrays of some names; other variables are skipped.

    Args:
        file: The file, opened for reading.
        size: Size of the file in bytes.
        names: Names of the wanted variables.

    Returns:
        The arrays that the file contains, by name.

    Raises:
        ValueError, EOFError, zlib.error: The file is not a MATLAB 5.0 file, or it is damaged.
    """
    head = exactly(file, 128)
    order = {b"IM": "<", b"MI": ">"}.get(head[126:128])
    if order is None or not head.startswith(b"MATLAB 5.0"):
        raise ValueError(f"the file begins with {head[:10]!r} instead of MATLAB 5.0")
    found: dict[str, np.ndarray] = {}
    place = 128
    for _ in range(VARIABLES):
        if place + 8 > size:
            return found
        file.seek(place)
        kind, length = struct.unpack(f"{order}II", exactly(file, 8))
        if length > size - place - 8:
            raise ValueError(f"a variable declares {length} bytes, but only {size - place - 8} are left")
        stream: IO[bytes] = file
        if kind == COMPRESSED:
            stream = _Inflated(file, length)  # type: ignore[assignment]
            inner, _length = struct.unpack(f"{order}II", exactly(stream, 8))
        if (inner if kind == COMPRESSED else kind) == MATRIX and (array := _matrix(stream, order, set(names))):
            found[array[0]] = array[1]
        place += 8 + length
    raise ValueError(f"the file has more than {VARIABLES} variables")


class _Inflated:
    """Content of a compressed variable, decompressed as it is read."""

    def __init__(self, file: IO[bytes], length: int):
        self._chunks = _inflate(file, length)
        self._left = b""

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes; none at the end."""
        if not self._left:
            self._left = next(self._chunks, b"")
        data, self._left = self._left[:count], self._left[count:]
        return data


def _inflate(file: IO[bytes], length: int) -> Iterator[bytes]:
    unpack = zlib.decompressobj()
    while length and not unpack.eof:
        packed = exactly(file, min(length, CHUNK))
        length -= len(packed)
        while packed and not unpack.eof:
            if data := unpack.decompress(packed, CHUNK):
                yield data
            packed = unpack.unconsumed_tail


def _matrix(stream: IO[bytes], order: str, names: set[str]) -> tuple[str, np.ndarray] | None:
    """Return name and values of an array, or None if it is not one of the wanted names."""
    flags, shape, name = (_element(stream, order) for _ in range(3))
    if len(flags) != 8 or len(shape) % 4 or not 8 <= len(shape) <= 32:
        raise ValueError("a variable's description is damaged")
    (flag,) = struct.unpack(f"{order}I", flags[:4])
    text = name.decode("latin1")
    if text not in names:
        return None
    if flag & 0xFF not in CLASSES or flag & 0x0800:
        raise ValueError(f"{text} is not an array of real numbers")
    sizes = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    if min(sizes) < 0:
        raise ValueError(f"{text} has the impossible shape {sizes}")
    stored, length, _ = _tag(stream, order)
    if stored not in STORED:
        raise ValueError(f"{text} is stored as unknown type {stored}")
    kind = np.dtype(order + STORED[stored])
    if length != math.prod(sizes) * kind.itemsize:
        raise ValueError(f"{text} of shape {list(sizes)} and type {kind} has {length} bytes")
    refuse_without_room(9 * length, f"variable {text} of shape {list(sizes)}", "download the file again", "it")
    values = np.frombuffer(exactly(stream, length), kind)
    return text, values.astype(CLASSES[flag & 0xFF], copy=False).reshape(sizes, order="F")


def _tag(stream: IO[bytes], order: str) -> tuple[int, int, bool]:
    """Return type and number of bytes of an element, and whether its data are within the same eight bytes."""
    (first,) = struct.unpack(f"{order}I", exactly(stream, 4))
    if first >> 16:
        return first & 0xFFFF, first >> 16, True
    (length,) = struct.unpack(f"{order}I", exactly(stream, 4))
    return first, length, False


def _element(stream: IO[bytes], order: str) -> bytes:
    """Return the data of a small element: flags, shape or name."""
    _kind, length, short = _tag(stream, order)
    if length > (4 if short else 1000):
        raise ValueError(f"a variable's description has {length} bytes")
    padded = 4 if short else -(-length // 8) * 8
    return exactly(stream, padded)[:length]
