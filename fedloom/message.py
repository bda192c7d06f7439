"""Message: the only thing that crosses the wire. Flat named tensors and a few numbers, as safetensors bytes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedloom.parts import State, nbytes


class Message(Mapping[str, Tensor]):
    """Named tensors from one place to another; `client` sent it (or gets it), `samples` is its training-set size."""

    def __init__(self, tensors: Mapping[str, Tensor], *, client: int | None = None, samples: int = 0):
        self.tensors: State = dict(tensors)
        self.client = client
        self.samples = samples

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Message(client={self.client}, samples={self.samples}, {len(self)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """What travels: the size of the tensors' contents."""
        return nbytes(self.tensors)

    def to_bytes(self) -> bytes:
        """Safetensors, with client and samples in the header."""
        return pack(self.tensors, {"client": self.client, "samples": self.samples})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Message":
        """The inverse of `to_bytes`."""
        tensors, header = unpack(data)
        return cls(tensors, client=header["client"], samples=header["samples"])


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able values as one safetensors blob (never pickle)."""
    # contiguous() alone would keep a channels-last layout, which safetensors refuses
    flat = {name: t.detach().cpu().contiguous(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return safetensors.torch.save(flat, metadata={"fedloom": json.dumps(header)})


def unpack(data: bytes) -> tuple[State, dict[str, Any]]:
    """The inverse of `pack`."""
    tensors = safetensors.torch.load(data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedloom"])
    return tensors, header
