"""Parts: everything a client or the server holds, as one tree of modules and tensors with flat, dotted names.

What is kept, sent, stored and compared is always the same shape: `{"model.head.weight": tensor, …}`. In memory it is
one buffer per dtype (`FlatState`), of which the named tensors are views: copying, checking and averaging a model take
one operation, however many tensors it has.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.torch_internals import foreach_copy_, foreach_lerp_, foreach_mul

State = dict[str, Tensor]
Part = nn.Module | Tensor


class Parts(nn.Module):
    """A method's parts as one module: modules become children, plain tensors become buffers."""

    def __init__(self, parts: Mapping[str, Part]):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their dotted names (the live tensors, not copies)."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def in_tree_order(self) -> dict[str, Tensor]:
        """The same, module by module: what belongs to a part stands together."""
        tensors = self.named_tensors()
        places = {name: i for i, (name, _) in enumerate(self.named_modules())}
        return {n: tensors[n] for n in sorted(tensors, key=lambda n: places[n.rpartition(".")[0]])}


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in the buffer of its dtype."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in a buffer [P], or in all rows of one [K, P]."""
        rows = buffer.shape[:-1]
        return buffer.as_strided(
            (*rows, *self.shape), (*buffer.stride()[:-1], *self.stride), buffer.storage_offset() + self.start
        )


class Range(NamedTuple):
    """A stretch of the buffer of a dtype, in two layouts."""

    dtype: torch.dtype
    here: int
    there: int
    length: int

    @property
    def end(self) -> tuple[int, int]:
        """Where it ends in both."""
        return self.here + self.length, self.there + self.length


class Layout:
    """Where named tensors lie in flat buffers, one per dtype, in the order of their names.

    Every tensor starts at a multiple of ALIGNMENT elements, as kernels want it. Equal layouts are one object.
    """

    ALIGNMENT: ClassVar[int] = 64
    _known: ClassVar[dict[tuple[object, ...], "Layout"]] = {}

    def __init__(self, spans: dict[str, Span], sizes: dict[torch.dtype, int]):
        self.spans, self.sizes = spans, sizes
        self._ranges: dict[Layout, tuple[list[Range], list[str]]] = {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The layout of these tensors; channels-last ones stay so."""
        spans: dict[str, Span] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, t in tensors.items():
            start = sizes.get(t.dtype, 0)
            spans[name] = Span(t.dtype, start, tuple(t.shape), torch.empty_like(t, device="meta").stride())
            sizes[t.dtype] = start + -(-t.numel() // cls.ALIGNMENT) * cls.ALIGNMENT
        return cls._known.setdefault(tuple(spans.items()), cls(spans, sizes))

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensors' contents, without gaps."""
        return sum(torch.Size(span.shape).numel() * span.dtype.itemsize for span in self.spans.values())

    @cached_property
    def signature(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, types and shapes."""
        return {name: (span.dtype, span.shape) for name, span in self.spans.items()}

    @cached_property
    def contents(self) -> frozenset[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """The same whatever their order."""
        return frozenset(self.signature.items())

    def zeros(self, device: torch.device, rows: tuple[int, ...] = ()) -> dict[torch.dtype, Tensor]:
        """Buffers, with leading dimensions if asked for."""
        return {dtype: torch.zeros(*rows, size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}

    def empty(self, device: torch.device, rows: tuple[int, ...] = ()) -> dict[torch.dtype, Tensor]:
        """Buffers to be filled whole, gaps included."""
        return {dtype: torch.empty(*rows, size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}

    def ranges(self, target: "Layout") -> tuple[list[Range], list[str]]:
        """Where what both have lies, neighbours joined; and names whose elements are in another order there.

        Raises:
            ValueError: A tensor has another shape or dtype there.
        """
        if target not in self._ranges:
            found: list[Range] = []
            apart: list[str] = []
            for name, span in self.spans.items():
                if (other := target.spans.get(name)) is None:
                    continue
                if (span.dtype, span.shape) != (other.dtype, other.shape):
                    raise ValueError(f"'{name}' is {span.dtype} {span.shape}, not {other.dtype} {other.shape}")
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
        """A flat copy of these tensors."""
        layout = Layout.of(tensors)
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        flat = cls(layout, layout.zeros(device))
        copy_all_(list(flat.views.values()), list(tensors.values()))
        return flat

    @cached_property
    def views(self) -> State:
        """The tensors by name; those of all rows where the buffers have rows."""
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
        """Names and tensors; asked for often, so at a dict's speed."""
        return self.views.items()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self.views.values()

    def floating(self) -> list[Tensor]:
        """The buffers that could hold a NaN."""
        return [buffer for dtype, buffer in self.buffers.items() if dtype.is_floating_point]

    def row(self, number: int) -> "FlatState":
        """One row of buffers that have several."""
        return FlatState(self.layout, {dtype: buffer[number] for dtype, buffer in self.buffers.items()})

    def copy(self) -> "FlatState":
        """The same in other memory."""
        return FlatState(self.layout, {dtype: buffer.clone() for dtype, buffer in self.buffers.items()})

    @torch.no_grad()
    def take(self, source: "FlatState") -> None:
        """Overwrites what both have; a source without rows goes into all rows."""
        ranges, apart = source.layout.ranges(self.layout)
        for dtype, start, here, length in ranges:
            self.buffers[dtype][..., here : here + length].copy_(source.buffers[dtype][..., start : start + length])
        for name in apart:
            self[name].copy_(source[name])

    def select(self, layout: Layout) -> "FlatState":
        """A copy of the tensors that this layout has."""
        rows = next((buffer.shape[:-1] for buffer in self.buffers.values()), torch.Size())
        if layout is self.layout:
            return self.copy()
        buffers: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in layout.sizes}
        for dtype, start, _, length in self.layout.ranges(layout)[0]:
            buffers[dtype].append(self.buffers[dtype][..., start : start + length])
        joined = {d: torch.cat(b, -1) if len(b) > 1 else b[0].clone() for d, b in buffers.items()}
        assert all(joined[dtype].shape == (*rows, size) for dtype, size in layout.sizes.items())
        return FlatState(layout, joined)


def under(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of these parts or lies inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def as_paths(parts: str | Sequence[str]) -> tuple[str, ...]:
    """One path or several, as a tuple."""
    return (parts,) if isinstance(parts, str) else tuple(parts)


def snapshot(parts: Parts, paths: Iterable[str] | None = None) -> State:
    """Copies of the tensors under these paths (all of them by default)."""
    paths = None if paths is None else tuple(paths)
    return copies({n: t for n, t in parts.named_tensors().items() if paths is None or under(n, paths)})


def serialisable(state: Mapping[str, Tensor], *, copy: bool = True) -> State:
    """Tensors as safetensors takes them: on the CPU, contiguous (channels-last is refused), no two in shared memory.

    Without `copy`, which saves time, tensors that share memory stay so.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return (
        {name: t.clone() if t.data_ptr() == state[name].data_ptr() else t for name, t in on_cpu.items()}
        if copy
        else on_cpu
    )


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Size of the tensors' contents."""
    if isinstance(state, FlatState):
        return state.layout.nbytes
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def tensors_of(part: Part) -> list[Tensor]:
    """Parameters, then buffers."""
    return [part] if isinstance(part, Tensor) else [*part.parameters(), *part.buffers()]


def parameters_of(part: Part) -> list[Tensor]:
    """What a gradient can reach."""
    return [part] if isinstance(part, Tensor) else list(part.parameters())


@torch.no_grad()
def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrites tensors in place, all of them in few operations."""
    whole: tuple[list[Tensor], list[Tensor]] = ([], [])
    floating: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        mine, theirs = floating if target.is_floating_point() else whole
        mine.append(target)
        theirs.append(source)
    for mine, theirs in (floating, whole):  # one operation copies tensors of one type
        if mine:
            foreach_copy_(mine, theirs)


def copies(tensors: Mapping[str, Tensor]) -> State:
    """Copies of tensors, all of them in few operations."""
    if not tensors:
        return {}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    with torch.no_grad():
        # times one changes no number, and makes all copies at once
        made = dict(zip(floats, foreach_mul(list(floats.values()), 1.0), strict=True)) if floats else {}
        return {name: made[name] if name in made else tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_(target: Part, source: Part | Mapping[str, Tensor]) -> None:
    """Overwrites a part in place, with a part of the same shape or with named tensors (those that it names)."""
    if isinstance(source, Mapping):
        assert isinstance(target, nn.Module), "named tensors go into a module"
        own = dict(target.named_parameters()) | dict(target.named_buffers())
        copy_all_([own[name] for name in source], list(source.values()))
        return
    copy_all_(tensors_of(target), tensors_of(source))


@torch.no_grad()
def lerp_(target: Part, source: Part, weight: float | Tensor) -> None:
    """target ← target + weight · (source − target), exact at 0 and 1. Integer buffers are taken from the source."""
    pairs = list(zip(tensors_of(target), tensors_of(source), strict=True))
    whole = [(mine, theirs) for mine, theirs in pairs if not mine.is_floating_point()]
    copy_all_([mine for mine, _ in whole], [theirs for _, theirs in whole])
    moving = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
    if isinstance(weight, Tensor):
        for mine, theirs in moving:
            mine.lerp_(theirs, weight.to(mine))
    elif moving:
        foreach_lerp_([mine for mine, _ in moving], [theirs for _, theirs in moving], weight)


@torch.no_grad()
def clamp_(target: Part, low: float, high: float) -> None:
    """Clips every parameter into [low, high], in place."""
    for tensor in parameters_of(target):
        tensor.clamp_(low, high)


def filled(module: nn.Module, value: float) -> nn.Module:
    """A copy of a module whose parameters all have this value."""
    module = deepcopy(module)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def inner_product(ones: Iterable[Tensor], others: Iterable[Tensor]) -> Tensor:
    """Σ ⟨a, b⟩ over pairs of tensors."""
    return torch.stack([(one * other).sum() for one, other in zip(ones, others, strict=True)]).sum()


def squared_distance(part: Part, reference: Part) -> Tensor:
    """‖part − reference‖² over parameters; no gradient reaches the reference."""
    mine = torch.cat([tensor.flatten() for tensor in parameters_of(part)])
    return (mine - torch.cat([tensor.detach().flatten() for tensor in parameters_of(reference)])).square().sum()
