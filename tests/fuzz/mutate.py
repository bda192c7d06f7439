"""Mutations of inputs: of bytes, of JSON and YAML, and of the inside of containers, whose checksums are made right."""

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

Mutate = Callable[[Random, bytes], bytes]

EDGES = [0, 1, 2, 7, 127, 128, 255, 256, *(2**n - k for n in (15, 16, 24, 31, 32, 40, 62, 63, 64) for k in (0, 1))]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**300,
    0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "0", "null", "../../x", "/dev/zero", "\0",
    "\ud800", "é" * 9, "x" * 3000, [], {}, [0], [[]], [None], {"": 0}, {"name": "x"}, ["a", 1], "last", "median:0",
    "float32", "fedavg", "mlp", "F32", "evil.py:Evil", "1e999", [0] * 300, [[1, 2**53]], [[0, 10**12]],
]  # fmt: skip
TOKENS = [
    b"&a ", b"*a", b"!!int ", b"!!bool x", b"!!timestamp x", b"!!binary /", b"!!set {a, b}",
    b"!!python/object:os.system {}", b"? ", b"- ", b"{", b"}", b"[", b"]", b"|\n", b">\n", b"2001-99-99", b"1e999",
    b"0x_", b"0b2", b"1:99:99", b": ", b"\t", b"<<: *a\n", b"%YAML 9.9\n", b"---\n", b"...\n", b"9" * 60, b".nan",
    b"-.inf", b"\xff", b"\x00", b"\n", b"  ", b"'", b'"', b"#", b"~", b"=", b",", b"\\u", b"@", b"`", b"on",
    b"999999999999", b"-1", b"1.5", b"nan", b"inf", b"257:1", b"0:1", b"seed", b"method", b"training", b".", b"..",
    b"name", b"true",
]  # fmt: skip


def flipped(rng: Random, data: bytes) -> bytes:
    """Some bits or bytes are others."""
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place = rng.randrange(len(out))
        out[place] = rng.choice((out[place] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
    return bytes(out)


def cut(rng: Random, data: bytes) -> bytes:
    """The end, the beginning or a piece is missing."""
    a, b = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return rng.choice((data[:a], data[:b], data[b:], data[:a] + data[b:]))


def repeated(rng: Random, data: bytes) -> bytes:
    """A piece stands there more than once."""
    a, b = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    piece = data[a : min(b, a + 200)]
    place = rng.randrange(len(data) + 1)
    return data[:place] + piece * rng.choice((1, 2, 50)) + data[place:]


def numbered(rng: Random, data: bytes) -> bytes:
    """A number in the first bytes, or anywhere, is at the edge of what its size can hold."""
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    end = len(data) if rng.random() < 0.4 else min(len(data), 200)
    place = rng.randrange(max(1, end - size + 1))
    return data[:place] + (rng.choice(EDGES) % 256**size).to_bytes(size, order) + data[place + size :]


def tokens(rng: Random, data: bytes) -> bytes:
    """Words and signs that mean something to a parser are inserted, or replace something."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.choice(TOKENS) + data[place + rng.choice((0, 0, 1, 3)) :]
    return data


PLAIN = (flipped, flipped, cut, repeated, numbered, numbered)


def plain(rng: Random, data: bytes) -> bytes:
    """One or two mutations of bytes."""
    for _ in range(rng.choice((1, 1, 2))):
        data = rng.choice(PLAIN)(rng, data)
    return data


def spliced(others: Sequence[bytes]) -> Mutate:
    """The beginning of one input and the end of another."""

    def mutate(rng: Random, data: bytes) -> bytes:
        other = rng.choice(others)
        return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]

    return mutate


def changed_value(rng: Random, value: Any) -> Any:
    """Nested values of which one is another, is missing, is renamed or stands somewhere else."""
    places = list(_places(value, []))
    if not places or rng.random() < 0.03:
        return deepcopy(rng.choice(VALUES))
    holder, key = rng.choice(places)
    act = rng.random()
    if act < 0.6:
        holder[key] = deepcopy(rng.choice(VALUES))
    elif act < 0.75:
        del holder[key]
    elif act < 0.85:
        other, theirs = rng.choice(places)
        try:
            holder[key] = other[theirs]
            json.dumps(value)
        except (KeyError, IndexError, ValueError):
            holder[key] = None
    elif isinstance(holder, dict):
        holder[rng.choice(("", "name", "x", str(key) + "x", "\ud800"))] = holder.pop(key)
    else:
        holder.insert(rng.randrange(len(holder) + 1), deepcopy(rng.choice(VALUES)))
    return value


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def in_json(rng: Random, data: bytes) -> bytes:
    """A value of a JSON text is changed; now and then it is nested deeply, or not JSON any more."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = changed_value(rng, value)
    text = json.dumps(value).encode()
    act = rng.random()
    if act < 0.02:
        return text.replace(b"null", b"[" * 3000 + b"]" * 3000, 1)
    if act < 0.04:
        return text.replace(b"1", b"9" * 5000, 1)
    return plain(rng, text) if act < 0.15 else text


def in_json_lines(rng: Random, data: bytes) -> bytes:
    """One line is changed."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = in_json(rng, lines[place])
    return b"\n".join(lines) + rng.choice((b"\n", b"\n", b""))


def in_safetensors(rng: Random, data: bytes) -> bytes:
    """The JSON header is changed, and its length is right."""
    length = int.from_bytes(data[:8], "little")
    header = in_json(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def in_own_header(rng: Random, data: bytes) -> bytes:
    """What fedloom wrote into the header is changed."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    own = header["__metadata__"]
    own["fedloom"] = in_json(rng, own["fedloom"].encode()).decode("utf-8", "replace")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def inside(unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes], mutate: Mutate = plain) -> Mutate:
    """What is packed is changed, and packed again."""
    return lambda rng, data: pack(mutate(rng, unpack(data)))


in_gzip = inside(gzip.decompress, lambda data: gzip.compress(data, 1, mtime=0))


def in_zip(rng: Random, data: bytes) -> bytes:
    """A member of an archive is changed; the archive itself is whole."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = rng.choice(list(members))
    if rng.random() < 0.5:  # the header of the array
        head, _, rest = members[name].partition(b"}")
        old, new = rng.choice((b"(", b"'|u1'", b"'<i8'", b"False", b", ", b"'shape'", b")")), rng.choice(NPY)
        head = head.replace(old, new, 1) if rng.random() < 0.8 else plain(rng, head)
        members[name] = head + b"}" + rest
    else:
        members[name] = plain(rng, members[name])
    if rng.random() < 0.1:
        members[rng.choice(("x.npy", "y.npy", "classes.npy", "groups.npy"))] = members[name]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


NPY = [
    b"(1000000000000, ", b"(0, ", b"(-1, ", b"((), ", b"(True, ", b"(2.5, ", b"(" * 200, b"'|O'", b"'<U9999999'",
    b"'|V4'", b"'<M8[s]'", b"[('a', '<i4')]", b"True", b"'<f8'", b"None", b"'|S0'", b", 18446744073709551616, ",
    b"'<c16'", b"",
]  # fmt: skip


def in_png(rng: Random, data: bytes) -> bytes:
    """The content of a chunk is changed; checksums are right."""
    out, place = bytearray(data[:8]), 8
    chunks = []
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    index = rng.randrange(len(chunks))
    kind, content = chunks[index]
    if kind == b"IDAT" and rng.random() < 0.5:
        content = zlib.compress(plain(rng, zlib.decompress(content)), 1)
    else:
        content = plain(rng, content or b"\0")
    chunks[index] = (kind if rng.random() < 0.9 else flipped(rng, kind), content)
    for kind, content in chunks:
        out += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return bytes(out)


def in_matlab(rng: Random, data: bytes) -> bytes:
    """The content of a compressed variable is changed, and compressed again."""
    (length,) = struct.unpack("<I", data[132:136])
    content = zlib.compress(plain(rng, zlib.decompress(data[136 : 136 + length])), 1)
    return data[:132] + struct.pack("<I", len(content)) + content + data[136 + length :]
