"""Compression of messages (the recipe's `wire` section), identical on every engine.

Clients encode what they send and the server decodes it, and vice versa. Byte counters and the ledger see the encoded
form. A client's tensors are encoded directly (fp16, bf16) or as the change since the received values (int8, topk),
which is smaller in magnitude. Integer tensors, row weights and summed tensors are not encoded, because a rounded count
would be a wrong weight. int8 and topk also leave tensors of fewer than 64 elements unchanged: they would save nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.checking import Section, as_written
from fedloom.core.message import Message, MessageError, Signature, mismatch, signature
from fedloom.core.state import State, under

MARK = "#"
RESIDUAL = "wire/"
"""Prefix of names in a client's memory: changes that topk has not sent yet."""
SMALL = 64


class Encoding(ABC):
    """Represents one tensor by one or more smaller tensors, which are named by suffixes."""

    of_change: ClassVar[bool] = False
    """Whether the change since the received value is encoded, instead of the value."""
    feedback: ClassVar[bool] = False
    """Whether the encoding error is added to the client's next message."""
    least: ClassVar[int] = 1

    @abstractmethod
    def encode(self, tensor: Tensor) -> State:
        """Return the tensors that are sent."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return an approximation of the original tensor, in the dtype and shape of `like`."""


class Half(Encoding):
    """float16: 16 bits per element."""

    def encode(self, tensor: Tensor) -> State:
        """Round to 10 bits of mantissa. Finite values beyond ±65504 are clamped; infinities are kept."""
        most = torch.finfo(torch.float16).max
        return {"fp16": torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(torch.float16)}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Convert to the original dtype, which is exact."""
        return parts["fp16"].to(like.dtype)


class Brain(Encoding):
    """bfloat16: 16 bits per element with the exponent range of float32. Sent as int16, which every library supports."""

    def encode(self, tensor: Tensor) -> State:
        """Round to 7 bits of mantissa."""
        return {"bf16": tensor.to(torch.bfloat16).view(torch.int16)}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Convert to the original dtype, which is exact."""
        return parts["bf16"].view(torch.bfloat16).to(like.dtype)


class Int8(Encoding):
    """8 bits per element and one scale per row (first dimension)."""

    of_change = True
    least = SMALL

    def encode(self, tensor: Tensor) -> State:
        """Round to the nearest of 255 steps between a row's largest magnitude and its negative."""
        rows = _rows(tensor)
        scale = rows.abs().amax(1, keepdim=True) / 127
        steps = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().nan_to_num(0)
        return {"int8": steps.clamp(-127, 127).to(torch.int8).reshape(tensor.shape), "scale": scale[:, 0].float()}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Multiply the integers by their scales."""
        return (_rows(parts["int8"]).float() * parts["scale"][:, None]).reshape(like.shape).to(like.dtype)


class TopK(Encoding):
    """The elements of largest magnitude with their positions; the client keeps the others (error feedback)."""

    of_change = True
    feedback = True
    least = SMALL

    def __init__(self, share: float):
        self.share = share

    def encode(self, tensor: Tensor) -> State:
        """Select the share of elements with the largest magnitude."""
        flat = tensor.reshape(-1)
        place = flat.abs().topk(max(1, round(self.share * flat.numel()))).indices.sort().values
        return {"place": place.to(torch.int32), "value": flat[place].float()}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Restore the selected elements; all others are zero.

        Raises:
            MessageError: A position is out of range.
        """
        place = parts["place"].long()
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < like.numel():
            raise MessageError("the message is refused: a topk position is outside its tensor")
        flat = torch.zeros(like.numel(), dtype=like.dtype, device=place.device)
        return flat.index_put_((place,), parts["value"].to(like.dtype)).reshape(like.shape)


PLAIN: Mapping[str, Callable[[], Encoding | None]] = {"none": lambda: None, "fp16": Half, "bf16": Brain, "int8": Int8}


def parse_encoding(text: str, *, sparse: bool = True) -> Encoding | None:
    """Return the encoding for `fp16`, `bf16`, `int8` or `topk:0.01`; None for `none`.

    Args:
        text: The encoding as written in a recipe.
        sparse: Whether `topk` is allowed.

    Raises:
        ValueError: The text is not a known encoding.
    """
    kind, _, rest = text.partition(":")
    if text in PLAIN:
        return PLAIN[text]()
    if kind == "topk" and sparse:
        try:
            share = float(rest)
        except ValueError:
            share = 0.0
        if 0 < share <= 1:
            return TopK(share)
        raise ValueError(f"'{text}': the share of elements to send must be above 0 and at most 1, as in topk:0.05")
    raise ValueError(f"'{text}' is unknown; write {', '.join(PLAIN)}{' or topk:0.05' if sparse else ''}")


class WireSettings(Section):
    """Compression of messages. `none` sends them unchanged."""

    up: Annotated[str, as_written(parse_encoding)] = Field(
        "none",
        description="encoding of clients' messages: none, fp16, bf16, int8 (of changes), topk:0.05 (the largest 5%)",
    )
    down: Annotated[str, as_written(partial(parse_encoding, sparse=False))] = Field(
        "none", description="encoding of the server's messages: none, fp16, bf16, int8"
    )


class Codec:
    """Encodes and decodes the messages of one experiment, in both directions."""

    def __init__(self, settings: WireSettings, exact: tuple[str, ...] = ()):
        self.up, self.down = parse_encoding(settings.up), parse_encoding(settings.down, sparse=False)
        self._exact = exact
        self._forms: dict[Hashable, Signature] = {}

    def encode_down(self, message: Message) -> Message:
        """Encode a message from the server to a client."""
        if self.down is None:
            return message
        return Message(self._encoded(message, self.down), client=message.client, samples=message.samples)

    def decode_down(self, message: Message, like: Mapping[str, Tensor]) -> Message:
        """Decode a message from the server; `like` are the client's tensors."""
        if self.down is None:
            return message
        return Message(self._decoded(message, self.down, _named(message, like)), client=message.client)

    def encode_up(self, message: Message, received: Mapping[str, Tensor], memory: State) -> tuple[Message, State]:
        """Encode a message from a client to the server.

        Returns:
            The encoded message, and the tensors that the client must remember for its next message.
        """
        if self.up is None:
            return message, {}
        state, residual = dict(message), {}
        for name in self._touched(state, self.up):
            if self.up.of_change and name in received:
                state[name] = state[name] - received[name].to(state[name])
            if self.up.feedback and (left := memory.get(RESIDUAL + name)) is not None:
                state[name] = state[name] + left.to(state[name])
        encoded = self._encoded(state, self.up)
        if self.up.feedback:
            arrived = self._decoded(encoded, self.up, state)
            touched = self._touched(state, self.up)
            residual = {RESIDUAL + name: state[name] - arrived[name] for name in touched}
        return Message(encoded, client=message.client, samples=message.samples), residual

    def decode_up(self, message: Message, received: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Message:
        """Decode a message from a client.

        Raises:
            MessageError: The message is not an encoding of tensors like `like`.
        """
        if self.up is None:
            return message
        state = self._decoded(message, self.up, like)
        if self.up.of_change:
            for name in self._touched(like, self.up):
                if name in received:
                    state[name] = state[name] + received[name].to(state[name])
        return Message(state, client=message.client, samples=message.samples, carried=message.nbytes)

    def _form(self, encoding: Encoding, like: Mapping[str, Tensor]) -> Signature:
        """Return the signature of tensors like these after encoding."""
        key = encoding, tuple(signature(like).items())
        if key not in self._forms:
            zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
            self._forms[key] = signature(self._encoded(zeros, encoding))
        return self._forms[key]

    def _touched(self, state: Mapping[str, Tensor], encoding: Encoding) -> list[str]:
        return [
            name
            for name, tensor in state.items()
            if tensor.is_floating_point() and tensor.numel() >= encoding.least and not under(name, self._exact)
        ]

    def _encoded(self, state: Mapping[str, Tensor], encoding: Encoding) -> State:
        touched = set(self._touched(state, encoding))
        encoded: State = {}
        for name, tensor in state.items():
            if name in touched:
                encoded |= {name + MARK + suffix: part for suffix, part in encoding.encode(tensor).items()}
            else:
                encoded[name] = tensor
        return encoded

    def _decoded(self, encoded: Mapping[str, Tensor], encoding: Encoding, like: Mapping[str, Tensor]) -> State:
        if wrong := mismatch(signature(encoded), self._form(encoding, like)):
            raise MessageError(f"the message is refused: {wrong}")
        touched = set(self._touched(like, encoding))
        state: State = {}
        for name, tensor in like.items():
            if name in touched:
                start = name + MARK
                parts = {key[len(start) :]: part for key, part in encoded.items() if key.startswith(start)}
                state[name] = encoding.decode(parts, tensor)
            else:
                state[name] = encoded[name]
        return state


def _named(message: Message, like: Mapping[str, Tensor]) -> State:
    """Return the client's tensors that occur in a message."""
    names = {name.partition(MARK)[0] for name in message}
    return {name: tensor for name, tensor in like.items() if name in names}


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
