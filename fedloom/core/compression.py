"""The `wire` section: messages made smaller on their way, the same on every engine.

What leaves a client is encoded there and decoded at the server, and the other way round; counters and the ledger see
the encoded form. A client's numbers are encoded either as they are (fp16, bf16) or as their change since what it
received (int8, topk), which is smaller. Whole numbers, row weights and what is summed travel as they are: a rounded
count would be a wrong weight; so do tensors of fewer than 64 numbers in int8 and topk, where nothing is to be gained.
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
"""Names in a client's memory: what topk has not sent yet."""
SMALL = 64


class Encoding(ABC):
    """One tensor as one or more smaller ones, by suffix."""

    of_change: ClassVar[bool] = False
    """Whether it encodes the change since what was received."""
    feedback: ClassVar[bool] = False
    """Whether what was lost is added to the next message."""
    least: ClassVar[int] = 1

    @abstractmethod
    def encode(self, tensor: Tensor) -> State:
        """What travels."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The tensor again, as nearly as may be, in the type and shape of `like`."""


class Half(Encoding):
    """16 bits a number."""

    def encode(self, tensor: Tensor) -> State:
        """10 bits of precision; beyond ±65504 it stays there, but infinity stays infinity."""
        most = torch.finfo(torch.float16).max
        return {"fp16": torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(torch.float16)}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Exact for what it holds."""
        return parts["fp16"].to(like.dtype)


class Brain(Encoding):
    """16 bits a number, as many for its size as a float32 has; as int16, which every library carries."""

    def encode(self, tensor: Tensor) -> State:
        """7 bits of precision."""
        return {"bf16": tensor.to(torch.bfloat16).view(torch.int16)}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Exact for what it holds."""
        return parts["bf16"].view(torch.bfloat16).to(like.dtype)


class Int8(Encoding):
    """8 bits a number, and a scale for each row (the first dimension)."""

    of_change = True
    least = SMALL

    def encode(self, tensor: Tensor) -> State:
        """To the nearest of 255 steps between a row's largest value and its negative."""
        rows = _rows(tensor)
        scale = rows.abs().amax(1, keepdim=True) / 127
        steps = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().nan_to_num(0)
        return {"int8": steps.clamp(-127, 127).to(torch.int8).reshape(tensor.shape), "scale": scale[:, 0].float()}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Steps times scale."""
        return (_rows(parts["int8"]).float() * parts["scale"][:, None]).reshape(like.shape).to(like.dtype)


class TopK(Encoding):
    """The largest changes alone, with their places; the rest waits at the client (error feedback)."""

    of_change = True
    feedback = True
    least = SMALL

    def __init__(self, share: float):
        self.share = share

    def encode(self, tensor: Tensor) -> State:
        """So many of each tensor's numbers as the share says."""
        flat = tensor.reshape(-1)
        place = flat.abs().topk(max(1, round(self.share * flat.numel()))).indices.sort().values
        return {"place": place.to(torch.int32), "value": flat[place].float()}

    def decode(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Zero elsewhere."""
        place = parts["place"].long()
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < like.numel():
            raise MessageError("the message is refused: a place lies outside its tensor")
        flat = torch.zeros(like.numel(), dtype=like.dtype, device=place.device)
        return flat.index_put_((place,), parts["value"].to(like.dtype)).reshape(like.shape)


PLAIN: Mapping[str, Callable[[], Encoding | None]] = {"none": lambda: None, "fp16": Half, "bf16": Brain, "int8": Int8}


def parse_encoding(text: str, *, sparse: bool = True) -> Encoding | None:
    """`fp16`, `bf16`, `int8`, `topk:0.01`, or `none`."""
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
        raise ValueError(f"'{text}': the share of numbers that travel must be above 0 and at most 1, as in topk:0.05")
    raise ValueError(f"'{text}' is unknown; write {', '.join(PLAIN)}{' or topk:0.05' if sparse else ''}")


class WireSettings(Section):
    """How messages are made smaller; `none` changes no bit."""

    up: Annotated[str, as_written(parse_encoding)] = Field(
        "none", description="what clients send: none, fp16, bf16, int8 (of the change), topk:0.05 (its largest 5%)"
    )
    down: Annotated[str, as_written(partial(parse_encoding, sparse=False))] = Field(
        "none", description="what clients get: none, fp16, bf16, int8"
    )


class Codec:
    """Both directions of one experiment."""

    def __init__(self, settings: WireSettings, exact: tuple[str, ...] = ()):
        self.up, self.down = parse_encoding(settings.up), parse_encoding(settings.down, sparse=False)
        self._exact = exact
        self._forms: dict[Hashable, Signature] = {}

    def encode_down(self, message: Message) -> Message:
        """What the server sends."""
        if self.down is None:
            return message
        return Message(self._encoded(message, self.down), client=message.client, samples=message.samples)

    def decode_down(self, message: Message, like: Mapping[str, Tensor]) -> Message:
        """What a client makes of it; `like` are its own tensors."""
        if self.down is None:
            return message
        return Message(self._decoded(message, self.down, _named(message, like)), client=message.client)

    def encode_up(self, message: Message, received: Mapping[str, Tensor], memory: State) -> tuple[Message, State]:
        """What a client sends, and what it keeps of it for the next time."""
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
        """What the server makes of it; anything but an encoding of `like` is a MessageError."""
        if self.up is None:
            return message
        state = self._decoded(message, self.up, like)
        if self.up.of_change:
            for name in self._touched(like, self.up):
                if name in received:
                    state[name] = state[name] + received[name].to(state[name])
        return Message(state, client=message.client, samples=message.samples, carried=message.nbytes)

    def _form(self, encoding: Encoding, like: Mapping[str, Tensor]) -> Signature:
        """What tensors like these look like when they are encoded."""
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
    """Those of a client's tensors that a message speaks of."""
    names = {name.partition(MARK)[0] for name in message}
    return {name: tensor for name, tensor in like.items() if name in names}


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
