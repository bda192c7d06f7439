"""Messages: named tensors and a few numbers as safetensors bytes, and the checks that bytes from outside must pass.

The layout is safetensors': 8 bytes with the length of a JSON header, the header, the tensors' contents. Every length is
compared with the bytes that are there, so that reading never takes more memory than the message has."""

import json
import math
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedloom.core.state import FlatState, State, copies, nbytes, serialisable
from fedloom.core.torch_internals import foreach_norm

LIMIT = 2**32
"""Bytes of a message from outside, unless a caller says otherwise."""
HEADER_LIMIT = 2**24
"""Bytes of its header: names, shapes and types of some hundred thousand tensors."""
DIMENSIONS = 32
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Signature = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Names of tensors with their types and shapes."""

Contents = frozenset[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]


class MessageError(ValueError):
    """Bytes that are no message, or not the one that was expected."""


def refuse_unless(right: bool, why: str) -> None:
    """Raises MessageError unless it is right."""
    if not right:
        raise MessageError(f"the message is refused: {why}")


def signature(tensors: Mapping[str, Tensor]) -> Signature:
    """What these tensors are called and look like."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def mismatch(found: Signature, expected: Signature) -> str | None:
    """The first thing in which tensors are not the expected ones, in words."""
    if found == expected:
        return None
    for name in expected:
        if name not in found:
            return f"'{name}' is missing"
    for name, (dtype, shape) in found.items():
        if name not in expected:
            return f"'{name:.80}' is not expected"
        if (dtype, shape) != expected[name]:
            wanted = expected[name]
            return f"'{name}' is {dtype} {list(shape)}, and {wanted[0]} {list(wanted[1])} is expected"
    return None


def check_bytes(data: bytes, limit: int | None = None, expected: Signature | None = None) -> str:
    """Refuses bytes that fedloom did not write; returns the text of the message's own header (client, samples)."""
    refuse_unless(limit is None or len(data) <= limit, f"it has {len(data)} bytes, and {limit} are allowed")
    refuse_unless(len(data) >= 8, f"it has {len(data)} bytes, and its length alone takes 8")
    length = int.from_bytes(data[:8], "little")
    refuse_unless(
        length <= min(len(data) - 8, HEADER_LIMIT), f"its header is said to have {length} bytes, of {len(data)} in all"
    )
    entries = read_json(data[8 : 8 + length], "the header")
    own = entries.pop("__metadata__", None)
    refuse_unless(isinstance(own, dict) and own.keys() == {"fedloom"}, "it was not written by fedloom")
    refuse_unless(isinstance(own["fedloom"], str), "its own header is no text")
    found, spans = {}, []
    for name, entry in entries.items():
        dtype, shape, span = _entry(name, entry)
        found[name] = dtype, shape
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        refuse_unless(start == end, "its tensors overlap or leave gaps")
        end = stop
    refuse_unless(end == len(data) - 8 - length, f"its tensors take {end} bytes, and {len(data) - 8 - length} came")
    if expected is not None and (wrong := mismatch(found, expected)):
        raise MessageError(f"the message is refused: {wrong}")
    return str(own["fedloom"])


def read_json(text: str | bytes, what: str, constants: bool = False) -> dict[str, Any]:
    """A JSON object whose names are all different; NaN and Infinity only with `constants`."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=None if constants else _no_constant)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message is refused: {what} is no JSON ({error!s:.80})") from None
    refuse_unless(isinstance(value, dict), f"{what} is no JSON object")
    return dict(value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    refuse_unless(len(found) == len(pairs), "a name stands in its header twice")
    return found


def _no_constant(text: str) -> None:
    raise MessageError(f"the message is refused: {text} in its header")


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """Type, shape and place of one tensor; its place has as many bytes as its shape needs."""
    fields = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    refuse_unless(fields, f"'{name:.80}' is not described by dtype, shape and data_offsets")
    kind, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    refuse_unless(isinstance(kind, str) and kind in DTYPES, f"'{name:.80}' is of unknown type {kind!r:.40}")
    refuse_unless(_counts(shape) and len(shape) <= DIMENSIONS, f"'{name:.80}' has the impossible shape {shape!r:.80}")
    refuse_unless(_counts(place) and len(place) == 2, f"'{name:.80}' has the impossible place {place!r:.80}")
    dtype = DTYPES[kind]
    possible = math.prod(max(1, size) for size in shape) * dtype.itemsize < 2**62  # also of an empty tensor
    refuse_unless(possible, f"'{name:.80}' has the impossible shape {shape!r:.80}")
    start, stop = place
    needed = math.prod(shape) * dtype.itemsize
    refuse_unless(stop - start == needed, f"'{name:.80}' needs {needed} bytes and has {stop - start}")
    return dtype, tuple(shape), (start, stop)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


class Message(Mapping[str, Tensor]):
    """Named tensors from one place to another; `client` sent it (or gets it), `samples` is its training-set size.

    `carried` is how many bytes travelled, where that was not these tensors but a smaller form of them (`wire`).
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, client: int | None = None, samples: int = 0, carried: int | None = None
    ):
        self.tensors: Mapping[str, Tensor] = tensors if isinstance(tensors, FlatState) else dict(tensors)
        self.client = client
        self.samples = samples
        self.carried = carried
        self.finite = False
        """Whether it is known that every number is finite."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors; asked for often, so at a dict's speed."""
        return self.tensors.items()

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Message(client={self.client}, samples={self.samples}, {len(self)} tensors, {self.nbytes} bytes)"

    def copy(self) -> "Message":
        """The same in other memory."""
        tensors = self.tensors.copy() if isinstance(self.tensors, FlatState) else copies(self.tensors)
        same = Message(tensors, client=self.client, samples=self.samples, carried=self.carried)
        same.finite = self.finite
        return same

    @cached_property
    def nbytes(self) -> int:
        """What travels: the size of the tensors' contents."""
        return nbytes(self.tensors) if self.carried is None else self.carried

    @cached_property
    def signature(self) -> Signature:
        """Names, types and shapes."""
        return self.tensors.layout.signature if isinstance(self.tensors, FlatState) else signature(self.tensors)

    @cached_property
    def contents(self) -> Contents:
        """The same whatever their order."""
        return (
            self.tensors.layout.contents if isinstance(self.tensors, FlatState) else frozenset(self.signature.items())
        )

    def not_finite(self) -> str | None:
        """The first tensor that has a NaN or an infinity; on a GPU one question for all of them."""
        if self.finite:
            return None
        # A sum is finite only if all its terms are; one that overflows is looked at again, tensor by tensor.
        if isinstance(self.tensors, FlatState) and all(math.isfinite(b.sum()) for b in self.tensors.floating()):
            return None
        numbers = self.numbers
        if not numbers or bool((finite := torch.stack(magnitudes(numbers.values())).isfinite()).all()):
            return None
        return list(numbers)[int((~finite).nonzero()[0])]

    @property
    def numbers(self) -> State:
        """The tensors that could have a NaN."""
        return {name: tensor for name, tensor in self.items() if tensor.is_floating_point() and tensor.numel()}

    def to_bytes(self) -> bytes:
        """Safetensors, with client and samples in the header."""
        return pack(self.tensors, {"client": self.client, "samples": self.samples})

    @classmethod
    def from_bytes(cls, data: bytes, *, limit: int | None = LIMIT, expected: Signature | None = None) -> "Message":
        """The inverse of `to_bytes`. Raises MessageError unless the bytes are complete and as expected."""
        tensors, header = unpack(data, limit=limit, expected=expected)
        refuse_unless(header.keys() == {"client", "samples"}, "its header must say client and samples, nothing else")
        client, samples = header["client"], header["samples"]
        refuse_unless(client is None or is_count(client, least=-1), f"client {client!r:.40} is no client's number")
        refuse_unless(is_count(samples), f"samples {samples!r:.40} is no number of samples")
        return cls(tensors, client=client, samples=samples)


def magnitudes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, all of the widest type; NaN where there is one."""
    norms = list(foreach_norm(list(tensors), torch.inf))
    widest = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return [norm if norm.dtype == widest else norm.to(widest) for norm in norms]


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able values as one safetensors blob (never pickle).

    The names are in the header too: safetensors gives tensors back in no particular order, and sums and random draws
    over a message follow its order.
    """
    text = json.dumps({**header, "names": list(tensors)})
    return safetensors.torch.save(serialisable(tensors, copy=False), metadata={"fedloom": text})


def unpack(data: bytes, *, limit: int | None = None, expected: Signature | None = None) -> tuple[State, dict[str, Any]]:
    """The inverse of `pack`. Nothing is allocated for tensors before all of the header is known to be right."""
    inner = check_bytes(data, limit, expected)
    header = read_json(inner, "its own header", constants=True)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # check_bytes is meant to be as strict as safetensors: if it is not, a typed error still
        raise MessageError(f"the message cannot be read: {type(error).__name__}: {error}") from error
    names = header.pop("names", sorted(tensors))
    refuse_unless(isinstance(names, list) and names == list(dict.fromkeys(map(str, names))), "its names are no list")
    refuse_unless(tensors.keys() == set(names), "its names are not those of its tensors")
    tensors = {name: tensors[name] for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel():
            refuse_unless(int(tensor.view(torch.uint8).max()) <= 1, f"'{name:.80}' has truth values besides 0 and 1")
    return tensors, header


def is_count(value: object, least: int = 0) -> bool:
    """Whether a header's value is a whole number that can be counted with exactly."""
    return type(value) is int and least <= value <= 2**53
