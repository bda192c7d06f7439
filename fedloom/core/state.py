"""Parts: everything a client or the server holds, as one tree of modules and tensors with flat, dotted names.

What is kept, sent, stored and compared is always the same shape: `{"model.head.weight": tensor, …}`.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

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
            torch._foreach_copy_(mine, theirs)


def copies(tensors: Mapping[str, Tensor]) -> State:
    """Copies of tensors, all of them in few operations."""
    if not tensors:
        return {}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    with torch.no_grad():
        # times one changes no number, and makes all copies at once
        made = dict(zip(floats, torch._foreach_mul(list(floats.values()), 1.0), strict=True)) if floats else {}
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
        torch._foreach_lerp_([mine for mine, _ in moving], [theirs for _, theirs in moving], weight)


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
