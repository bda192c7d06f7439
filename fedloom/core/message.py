"""Messages: named tensors and a few numbers as safetensors bytes, with checks of untrusted input.

The layout is that of safetensors: 8 bytes with the length of a JSON header, the header, the tensors' contents. Every
length is compared with the bytes received, so that parsing never takes more memory than the message itself.
"""

import json
import math
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedloom.core.flat_state import FlatState, nbytes
from fedloom.core.state import State, copies, serialisable
from fedloom.core.torch_internals import foreach_norm

LIMIT = 2**32
"""Default limit on the size of a received message, in bytes."""
HEADER_LIMIT = 2**24
"""Limit on the size of its header, in bytes: enough for some hundred thousand tensors."""
DIMENSIONS = 32
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Signature = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Names of tensors with their dtypes and shapes."""

Contents = frozenset[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]


class MessageError(ValueError):
    """Bytes that are not a valid message, or not the expected one."""


def refuse_unless(condition: bool, why: str) -> None:
    """Raise MessageError with this reason unless the condition holds."""
    if not condition:
        raise MessageError(f"the message is refused: {why}")


def signature(tensors: Mapping[str, Tensor]) -> Signature:
    """Return the names, dtypes and shapes of tensors."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def mismatch(found: Signature, expected: Signature) -> str | None:
    """Return a description of the first difference between two signatures; None if they are equal."""
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
            return f"'{name}' is {dtype} {list(shape)}, but {wanted[0]} {list(wanted[1])} is expected"
    return None


def check_bytes(data: bytes, limit: int | None = None, expected: Signature | None = None) -> str:
    """Check that bytes are a message written by fedloom.

    Args:
        data: The received bytes.
        limit: Maximum number of bytes.
        expected: The signature that the tensors must have.

    Returns:
        The text of fedloom's header (client, samples).

    Raises:
        MessageError: The bytes are not a valid message.
    """
    refuse_unless(limit is None or len(data) <= limit, f"it has {len(data)} bytes, but only {limit} are allowed")
    refuse_unless(len(data) >= 8, f"it has {len(data)} bytes, but at least 8 are needed")
    length = int.from_bytes(data[:8], "little")
    refuse_unless(
        length <= min(len(data) - 8, HEADER_LIMIT), f"its header claims {length} bytes, but the message has {len(data)}"
    )
    entries = read_json(data[8 : 8 + length], "the header")
    own = entries.pop("__metadata__", None)
    refuse_unless(isinstance(own, dict) and own.keys() == {"fedloom"}, "it was not written by fedloom")
    refuse_unless(isinstance(own["fedloom"], str), "fedloom's header is not text")
    found, spans = {}, []
    for name, entry in entries.items():
        dtype, shape, span = _entry(name, entry)
        found[name] = dtype, shape
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        refuse_unless(start == end, "its tensors overlap or leave gaps")
        end = stop
    refuse_unless(
        end == len(data) - 8 - length, f"its tensors take {end} bytes, but {len(data) - 8 - length} were received"
    )
    if expected is not None and (wrong := mismatch(found, expected)):
        raise MessageError(f"the message is refused: {wrong}")
    return str(own["fedloom"])


def read_json(text: str | bytes, what: str, constants: bool = False) -> dict[str, Any]:
    """Parse a JSON object without duplicate names. NaN and Infinity are allowed only with `constants`.

    Raises:
        MessageError: The text is not such an object.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=None if constants else _no_constant)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message is refused: {what} is not JSON ({error!s:.80})") from None
    refuse_unless(isinstance(value, dict), f"{what} is not a JSON object")
    return dict(value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    refuse_unless(len(found) == len(pairs), "a name occurs twice in its header")
    return found


def _no_constant(text: str) -> None:
    raise MessageError(f"the message is refused: its header contains {text}")


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and byte range of one tensor, after checking that they are consistent."""
    fields = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    refuse_unless(fields, f"'{name:.80}' is not described by dtype, shape and data_offsets")
    kind, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    refuse_unless(isinstance(kind, str) and kind in DTYPES, f"'{name:.80}' is of unknown type {kind!r:.40}")
    refuse_unless(_counts(shape) and len(shape) <= DIMENSIONS, f"'{name:.80}' has the impossible shape {shape!r:.80}")
    refuse_unless(_counts(place) and len(place) == 2, f"'{name:.80}' has the impossible byte range {place!r:.80}")
    dtype = DTYPES[kind]
    possible = (
        math.prod(max(1, size) for size in shape) * dtype.itemsize < 2**62
    )  # dimensions of size 0 are ignored: the others must still be possible
    refuse_unless(possible, f"'{name:.80}' has the impossible shape {shape!r:.80}")
    start, stop = place
    needed = math.prod(shape) * dtype.itemsize
    refuse_unless(stop - start == needed, f"'{name:.80}' needs {needed} bytes, but has {stop - start}")
    return dtype, tuple(shape), (start, stop)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


class Message(Mapping[str, Tensor]):
    """Named tensors that a client sends to the server, or the server to a client. A read-only mapping.

    Attributes:
        tensors: The tensors by name.
        client: The client that sends or receives it; None for messages to all clients.
        samples: Number of training samples of the client, the default averaging weight.
        carried: Bytes that were transmitted, if the tensors were compressed (`wire`).
        finite: Whether all values are already known to be finite.

    Example:
        >>> message = Message({"model.bias": torch.zeros(3)}, client=0, samples=10)
        >>> message.nbytes
        12
        >>> Message.from_bytes(message.to_bytes())["model.bias"]
        tensor([0., 0., 0.])
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, client: int | None = None, samples: int = 0, carried: int | None = None
    ):
        self.tensors: Mapping[str, Tensor] = tensors if isinstance(tensors, FlatState) else dict(tensors)
        self.client = client
        self.samples = samples
        self.carried = carried
        self.finite = False

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors; defined here because `Mapping.items` is slow."""
        return self.tensors.items()

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Message(client={self.client}, samples={self.samples}, {len(self)} tensors, {self.nbytes} bytes)"

    def copy(self) -> "Message":
        """Return a deep copy."""
        tensors = self.tensors.copy() if isinstance(self.tensors, FlatState) else copies(self.tensors)
        same = Message(tensors, client=self.client, samples=self.samples, carried=self.carried)
        same.finite = self.finite
        return same

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes transmitted: the size of the tensors, or of their compressed form."""
        return nbytes(self.tensors) if self.carried is None else self.carried

    @cached_property
    def signature(self) -> Signature:
        """Names, dtypes and shapes."""
        return self.tensors.layout.signature if isinstance(self.tensors, FlatState) else signature(self.tensors)

    @cached_property
    def contents(self) -> Contents:
        """Names, dtypes and shapes as a set, independent of their order."""
        return (
            self.tensors.layout.contents if isinstance(self.tensors, FlatState) else frozenset(self.signature.items())
        )

    def not_finite(self) -> str | None:
        """Return the name of the first tensor with a NaN or infinity; None if there is none.

        On a GPU this synchronises once, not once per tensor.
        """
        if self.finite:
            return None
        # A finite sum implies finite terms. A sum may also overflow, so then each tensor is checked.
        if isinstance(self.tensors, FlatState) and all(math.isfinite(b.sum()) for b in self.tensors.floating()):
            return None
        numbers = self.numbers
        if not numbers or bool((finite := torch.stack(magnitudes(numbers.values())).isfinite()).all()):
            return None
        return list(numbers)[int((~finite).nonzero()[0])]

    @property
    def numbers(self) -> State:
        """The non-empty floating-point tensors."""
        return {name: tensor for name, tensor in self.items() if tensor.is_floating_point() and tensor.numel()}

    def to_bytes(self) -> bytes:
        """Serialise as safetensors, with client and samples in the header."""
        return pack(self.tensors, {"client": self.client, "samples": self.samples})

    @classmethod
    def from_bytes(cls, data: bytes, *, limit: int | None = LIMIT, expected: Signature | None = None) -> "Message":
        """Deserialise bytes written by `to_bytes`.

        Args:
            data: The bytes, which may come from an untrusted source.
            limit: Maximum number of bytes; None for no limit.
            expected: The signature that the tensors must have.

        Raises:
            MessageError: The bytes are incomplete, invalid or not as expected.
        """
        tensors, header = unpack(data, limit=limit, expected=expected)
        refuse_unless(header.keys() == {"client", "samples"}, "its header must have the fields client and samples only")
        client, samples = header["client"], header["samples"]
        refuse_unless(
            client is None or is_count(client, least=-1), f"client = {client!r:.40}: must be a client's number"
        )
        refuse_unless(is_count(samples), f"samples = {samples!r:.40}: must be a number of samples")
        return cls(tensors, client=client, samples=samples)


def magnitudes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor (NaN if it contains one), all in the widest dtype."""
    norms = list(foreach_norm(list(tensors), torch.inf))
    widest = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return [norm if norm.dtype == widest else norm.to(widest) for norm in norms]


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Serialise tensors and JSON-compatible values as safetensors. Pickle is never used.

    The header repeats the names: safetensors does not preserve the order of tensors, but sums and random draws over a
    message depend on it.
    """
    text = json.dumps({**header, "names": list(tensors)})
    return safetensors.torch.save(serialisable(tensors, copy=False), metadata={"fedloom": text})


def unpack(data: bytes, *, limit: int | None = None, expected: Signature | None = None) -> tuple[State, dict[str, Any]]:
    """Deserialise bytes written by `pack`. No tensor is allocated before the whole header has been checked.

    Raises:
        MessageError: The bytes are not a valid message.
    """
    inner = check_bytes(data, limit, expected)
    header = read_json(inner, "fedloom's header", constants=True)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # check_bytes should be as strict as safetensors; if not, raise our error type
        raise MessageError(f"the message cannot be read: {type(error).__name__}: {error}") from error
    names = header.pop("names", sorted(tensors))
    refuse_unless(
        isinstance(names, list) and names == list(dict.fromkeys(map(str, names))),
        "its names are not a list of distinct names",
    )
    refuse_unless(tensors.keys() == set(names), "its names differ from those of its tensors")
    tensors = {name: tensors[name] for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel():
            refuse_unless(
                int(tensor.view(torch.uint8).max()) <= 1, f"'{name:.80}' has boolean values other than 0 and 1"
            )
    return tensors, header


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a header's value is an integer that floats represent exactly."""
    return type(value) is int and least <= value <= 2**53
