"""Message: the only thing that crosses the wire. Flat named tensors and a few numbers, as safetensors bytes."""

import json
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedloom.envelope import LIMIT, MessageError, Signature, check_bytes, read_json, refuse_unless, signature
from fedloom.parts import State, copies, nbytes


class Message(Mapping[str, Tensor]):
    """Named tensors from one place to another; `client` sent it (or gets it), `samples` is its training-set size.

    `carried` is how many bytes travelled, where that was not these tensors but a smaller form of them (`wire`).
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        client: int | None = None,
        samples: int = 0,
        carried: int | None = None,
    ):
        self.tensors: State = dict(tensors)
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
        same = Message(copies(self.tensors), client=self.client, samples=self.samples, carried=self.carried)
        same.finite = self.finite
        return same

    @cached_property
    def nbytes(self) -> int:
        """What travels: the size of the tensors' contents."""
        return nbytes(self.tensors) if self.carried is None else self.carried

    @cached_property
    def signature(self) -> Signature:
        """Names, types and shapes."""
        return signature(self.tensors)

    def not_finite(self) -> str | None:
        """The first tensor that has a NaN or an infinity; on a GPU one question for all of them."""
        if self.finite:
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
        """The inverse of `to_bytes`; whoever sent it, it is whole and as expected, or a MessageError."""
        tensors, header = unpack(data, limit=limit, expected=expected)
        refuse_unless(header.keys() == {"client", "samples"}, "its header must say client and samples, nothing else")
        client, samples = header["client"], header["samples"]
        refuse_unless(client is None or is_count(client, least=-1), f"client {client!r:.40} is no client's number")
        refuse_unless(is_count(samples), f"samples {samples!r:.40} is no number of samples")
        return cls(tensors, client=client, samples=samples)


def magnitudes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, all of the widest type; NaN where there is one."""
    norms = list(torch._foreach_norm(list(tensors), torch.inf))
    widest = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return [norm if norm.dtype == widest else norm.to(widest) for norm in norms]


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able values as one safetensors blob (never pickle)."""
    # safetensors refuses tensors that are not contiguous, channels-last ones among them; contiguous() makes them so
    flat = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return safetensors.torch.save(flat, metadata={"fedloom": json.dumps(header)})


def unpack(data: bytes, *, limit: int | None = None, expected: Signature | None = None) -> tuple[State, dict[str, Any]]:
    """The inverse of `pack`. Nothing is allocated for tensors before all of the header is known to be right."""
    inner = check_bytes(data, limit, expected)
    header = read_json(inner, "its own header", constants=True)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # check_bytes is meant to be as strict as safetensors: if it is not, a typed error still
        raise MessageError(f"the message cannot be read: {type(error).__name__}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel():
            refuse_unless(int(tensor.view(torch.uint8).max()) <= 1, f"'{name:.80}' has truth values besides 0 and 1")
    return tensors, header


def is_count(value: object, least: int = 0) -> bool:
    """Whether a header's value is a whole number that can be counted with exactly."""
    return type(value) is int and least <= value <= 2**53
