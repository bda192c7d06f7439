"""Flat state: named tensors as views of one buffer per dtype.

So copying, checking and averaging a model take one operation per dtype, independent of the number of tensors.
"""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.core.state import State, copy_all_


@dataclass(frozen=True)
class Span:
    """Position of a tensor in the buffer of its dtype."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor in a buffer [P], or in all rows of a buffer [K, P]."""
        rows = buffer.shape[:-1]
        return buffer.as_strided(
            (*rows, *self.shape), (*buffer.stride()[:-1], *self.stride), buffer.storage_offset() + self.start
        )


class Range(NamedTuple):
    """A contiguous range of elements of one dtype, at its positions in two layouts."""

    dtype: torch.dtype
    here: int
    there: int
    length: int

    @property
    def end(self) -> tuple[int, int]:
        """End positions in both layouts."""
        return self.here + self.length, self.there + self.length


class Layout:
    """Positions of named tensors in flat buffers, one per dtype, in the order of the names.

    Every tensor starts at a multiple of ALIGNMENT elements, for the sake of GPU kernels. Equal layouts are the same
    object.
    """

    ALIGNMENT: ClassVar[int] = 64
    _known: ClassVar[dict[tuple[object, ...], "Layout"]] = {}

    def __init__(self, spans: dict[str, Span], sizes: dict[torch.dtype, int]):
        self.spans, self.sizes = spans, sizes
        self._ranges: dict[Layout, tuple[list[Range], list[str]]] = {}
        self._missing: dict[Layout, list[str]] = {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Return the layout of tensors. Channels-last tensors keep their strides."""
        spans: dict[str, Span] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, t in tensors.items():
            start = sizes.get(t.dtype, 0)
            spans[name] = Span(t.dtype, start, tuple(t.shape), torch.empty_like(t, device="meta").stride())
            sizes[t.dtype] = start + -(-t.numel() // cls.ALIGNMENT) * cls.ALIGNMENT
        return cls._known.setdefault(tuple(spans.items()), cls(spans, sizes))

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensors in bytes, without alignment gaps."""
        return sum(torch.Size(span.shape).numel() * span.dtype.itemsize for span in self.spans.values())

    @cached_property
    def signature(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes."""
        return {name: (span.dtype, span.shape) for name, span in self.spans.items()}

    @cached_property
    def contents(self) -> frozenset[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Names, dtypes and shapes as a set, independent of their order."""
        return frozenset(self.signature.items())

    def zeros(self, device: torch.device, rows: tuple[int, ...] = ()) -> dict[torch.dtype, Tensor]:
        """Return zeroed buffers, with leading dimensions `rows`."""
        return {dtype: torch.zeros(*rows, size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}

    def empty(self, device: torch.device, rows: tuple[int, ...] = ()) -> dict[torch.dtype, Tensor]:
        """Return uninitialised buffers. The caller must fill them completely, gaps included."""
        return {dtype: torch.empty(*rows, size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}

    def missing(self, target: "Layout") -> list[str]:
        """Return the names of the tensors that only `target` has."""
        if target not in self._missing:
            self._missing[target] = [name for name in target.spans if name not in self.spans]
        return self._missing[target]

    def ranges(self, target: "Layout") -> tuple[list[Range], list[str]]:
        """Return where the common tensors are in both layouts, and the names of tensors with different strides.

        Adjacent ranges are merged.

        Raises:
            ValueError: A tensor has a different shape or dtype in `target`.
        """
        if target not in self._ranges:
            found: list[Range] = []
            apart: list[str] = []
            for name, span in self.spans.items():
                if (other := target.spans.get(name)) is None:
                    continue
                if (span.dtype, span.shape) != (other.dtype, other.shape):
                    raise ValueError(
                        f"'{name}' is {span.dtype} {span.shape}, but {other.dtype} {other.shape} is expected"
                    )
                if span.stride != other.stride:
                    apart.append(name)
                    continue
                length = -(-torch.Size(span.shape).numel() // self.ALIGNMENT) * self.ALIGNMENT
                last = next((r for r in found if r.dtype == span.dtype and r.end == (span.start, other.start)), None)
                if last is not None:
                    found[found.index(last)] = Range(last.dtype, last.here, last.there, last.length + length)
                else:
                    found.append(Range(span.dtype, span.start, other.start, length))
            self._ranges[target] = sorted(found, key=lambda r: r.there), apart
        return self._ranges[target]


class FlatState(Mapping[str, Tensor]):
    """Named tensors as views of one buffer per dtype."""

    def __init__(self, layout: Layout, buffers: dict[torch.dtype, Tensor]):
        self.layout, self.buffers = layout, buffers

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "FlatState":
        """Return a flat copy of tensors."""
        layout = Layout.of(tensors)
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        flat = cls(layout, layout.zeros(device))
        copy_all_(list(flat.views.values()), list(tensors.values()))
        return flat

    @cached_property
    def views(self) -> State:
        """The tensors by name. If the buffers have rows, each tensor has them as its leading dimension."""
        return {name: span.view(self.buffers[span.dtype]) for name, span in self.layout.spans.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.spans)

    def __len__(self) -> int:
        return len(self.layout.spans)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.spans

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors; defined here because `Mapping.items` is slow."""
        return self.views.items()

    def values(self) -> ValuesView[Tensor]:
        """Return the tensors; defined here because `Mapping.values` is slow."""
        return self.views.values()

    def floating(self) -> list[Tensor]:
        """Return the floating-point buffers."""
        return [buffer for dtype, buffer in self.buffers.items() if dtype.is_floating_point]

    def row(self, number: int | slice) -> "FlatState":
        """Return one row, or some rows, of buffers that have several, without copying."""
        return FlatState(self.layout, {dtype: buffer[number] for dtype, buffer in self.buffers.items()})

    def copy(self) -> "FlatState":
        """Return a deep copy."""
        return FlatState(self.layout, {dtype: buffer.clone() for dtype, buffer in self.buffers.items()})

    def take(self, source: "FlatState") -> None:
        """Copy the common tensors from another state. A source without rows is copied to all rows."""
        ranges, apart = source.layout.ranges(self.layout)
        for dtype, start, here, length in ranges:
            self.buffers[dtype].narrow(-1, here, length).copy_(source.buffers[dtype].narrow(-1, start, length))
        for name in apart:
            self[name].copy_(source[name])

    def select(self, layout: Layout) -> "FlatState":
        """Return a copy that contains the tensors of `layout`."""
        rows = next((buffer.shape[:-1] for buffer in self.buffers.values()), torch.Size())
        if layout is self.layout:
            return self.copy()
        buffers: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in layout.sizes}
        for dtype, start, _, length in self.layout.ranges(layout)[0]:
            buffers[dtype].append(self.buffers[dtype][..., start : start + length])
        joined = {d: torch.cat(b, -1) if len(b) > 1 else b[0].clone() for d, b in buffers.items()}
        assert all(joined[dtype].shape == (*rows, size) for dtype, size in layout.sizes.items())
        return FlatState(layout, joined)


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Return the size of the tensors in bytes."""
    if isinstance(state, FlatState):
        return state.layout.nbytes
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
