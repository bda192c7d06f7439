"""Parts: all state of a client or the server, as one tree of modules and tensors with dotted names.

State that is kept, sent, stored or compared is always a mapping such as `{"model.head.weight": tensor, …}`. In memory
it is one buffer per dtype (`FlatState`), of which the named tensors are views. So copying, checking and averaging a
model take one operation per dtype, independent of the number of tensors.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import UserError, nearest
from fedloom.core.torch_internals import foreach_copy_, foreach_lerp_, foreach_mul

State = dict[str, Tensor]
"""Tensors by their dotted names."""
Part = nn.Module | Tensor
"""A value that `Method.build` may return."""


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
        """Return parameters and buffers by their dotted names, without copying."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def refuse_unknown(self, path: str, where: str) -> None:
        """Raise a UserError that begins with `where` unless a part, or something inside a part, has this path."""
        if path and (any(under(name, (path,)) for name in self.named_tensors()) or path in dict(self.named_modules())):
            return
        known = {".".join(name.split(".")[:depth]) for name in self.named_tensors() for depth in (1, 2)}
        raise UserError(f"{where}: there is no part '{path}'; {nearest(path, known)}")

    def in_tree_order(self) -> dict[str, Tensor]:
        """Return parameters and buffers ordered by module, so that the tensors of a part are contiguous."""
        tensors = self.named_tensors()
        places = {name: i for i, (name, _) in enumerate(self.named_modules())}
        return {n: tensors[n] for n in sorted(tensors, key=lambda n: places[n.rpartition(".")[0]])}


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

    def row(self, number: int) -> "FlatState":
        """Return one row of buffers that have several."""
        return FlatState(self.layout, {dtype: buffer[number] for dtype, buffer in self.buffers.items()})

    def copy(self) -> "FlatState":
        """Return a deep copy."""
        return FlatState(self.layout, {dtype: buffer.clone() for dtype, buffer in self.buffers.items()})

    @torch.no_grad()
    def take(self, source: "FlatState") -> None:
        """Copy the common tensors from another state. A source without rows is copied to all rows."""
        ranges, apart = source.layout.ranges(self.layout)
        for dtype, start, here, length in ranges:
            self.buffers[dtype][..., here : here + length].copy_(source.buffers[dtype][..., start : start + length])
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


def under(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted name is one of the parts `prefixes` or inside one of them.

    Example:
        >>> under("model.head.weight", ["model.head"]), under("model.header", ["model.head"])
        (True, False)
    """
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def as_paths(parts: str | Sequence[str]) -> tuple[str, ...]:
    """Return one path or several as a tuple."""
    return (parts,) if isinstance(parts, str) else tuple(parts)


def snapshot(parts: Parts, paths: Iterable[str] | None = None) -> State:
    """Return copies of the tensors under some paths.

    Args:
        parts: The tree.
        paths: Parts to copy. Default: all.

    Returns:
        The copies by dotted name.
    """
    paths = None if paths is None else tuple(paths)
    return copies({n: t for n, t in parts.named_tensors().items() if paths is None or under(n, paths)})


def serialisable(state: Mapping[str, Tensor], *, copy: bool = True) -> State:
    """Return tensors as safetensors requires them: on the CPU, contiguous, and without shared memory.

    With `copy=False`, which is faster, tensors that share memory continue to do so.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return (
        {name: t.clone() if t.data_ptr() == state[name].data_ptr() else t for name, t in on_cpu.items()}
        if copy
        else on_cpu
    )


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Return the size of the tensors in bytes."""
    if isinstance(state, FlatState):
        return state.layout.nbytes
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def tensors_of(part: Part) -> list[Tensor]:
    """Return a module's parameters followed by its buffers; a tensor is returned as a list of one."""
    return [part] if isinstance(part, Tensor) else [*part.parameters(), *part.buffers()]


def parameters_of(part: Part) -> list[Tensor]:
    """Return a module's parameters; a tensor is returned as a list of one."""
    return [part] if isinstance(part, Tensor) else list(part.parameters())


@torch.no_grad()
def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in place, in few operations."""
    whole: tuple[list[Tensor], list[Tensor]] = ([], [])
    floating: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        to, from_ = floating if target.is_floating_point() else whole
        to.append(target)
        from_.append(source)
    for to, from_ in (floating, whole):  # a fused copy handles one kind of dtype
        if to:
            foreach_copy_(to, from_)


def copies(tensors: Mapping[str, Tensor]) -> State:
    """Return copies of named tensors, made in few operations."""
    if not tensors:
        return {}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    with torch.no_grad():
        # multiplying by one copies all tensors in one operation
        made = dict(zip(floats, foreach_mul(list(floats.values()), 1.0), strict=True)) if floats else {}
        return {name: made[name] if name in made else tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_(target: Part, source: Part | Mapping[str, Tensor]) -> None:
    """Copy `source` into `target` in place.

    Args:
        target: A module or tensor.
        source: A module or tensor of the same structure, or named tensors; then only those are overwritten.

    Example:
        >>> copy_(client.model.head, client.received.model.head)
    """
    if isinstance(source, Mapping):
        assert isinstance(target, nn.Module), "copy_: named tensors can be copied into a module only"
        own = dict(target.named_parameters()) | dict(target.named_buffers())
        copy_all_([own[name] for name in source], list(source.values()))
        return
    copy_all_(tensors_of(target), tensors_of(source))


@torch.no_grad()
def lerp_(target: Part, source: Part, weight: float | Tensor) -> None:
    """Interpolate in place: target ← target + weight · (source − target), exact for weights 0 and 1.

    Integer buffers are copied from the source.

    Args:
        target: A module or tensor.
        source: A module or tensor of the same structure.
        weight: Interpolation weight, a number or a 0-d tensor.

    Example:
        >>> lerp_(client.teacher, client.model, 1 - self.decay)
    """
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
    """Clamp all parameters to [low, high] in place.

    Args:
        target: A module or tensor.
        low: Lower bound.
        high: Upper bound.
    """
    for tensor in parameters_of(target):
        tensor.clamp_(low, high)


def as_buffers(module: nn.Module, *, inside: bool = True) -> None:
    """Turn all parameters of a module into buffers, so that optimizers and proximal terms do not include them.

    With `inside=False`, the parameters of its submodules stay as they are.
    """
    for inner in module.modules() if inside else (module,):
        for name, parameter in list(inner._parameters.items()):
            del inner._parameters[name]
            inner.register_buffer(name, None if parameter is None else parameter.detach().clone())


def filled(module: nn.Module, value: float) -> nn.Module:
    """Return a copy of a module with all parameters set to a value.

    Args:
        module: The module to copy.
        value: The value of all parameters.

    Example:
        >>> filled(task.model(), 0.5)
    """
    module = deepcopy(module)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def inner_product(ones: Iterable[Tensor], others: Iterable[Tensor]) -> Tensor:
    """Return Σ ⟨a, b⟩ over pairs of tensors.

    Args:
        ones: Tensors.
        others: Tensors of the same shapes.

    Returns:
        A 0-d tensor.
    """
    return torch.stack([(one * other).sum() for one, other in zip(ones, others, strict=True)]).sum()


def squared_distance(part: Part, reference: Part) -> Tensor:
    """Return ‖part − reference‖² over all parameters.

    Args:
        part: A module or tensor, which receives gradients.
        reference: A module or tensor of the same structure, without gradients.

    Returns:
        A 0-d tensor.

    Example:
        >>> loss = loss + self.mu / 2 * squared_distance(client.model, client.received.model)
    """
    mine = torch.cat([tensor.flatten() for tensor in parameters_of(part)])
    return (mine - torch.cat([tensor.detach().flatten() for tensor in parameters_of(reference)])).square().sum()
