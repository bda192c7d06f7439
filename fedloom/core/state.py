"""Parts and state: the module tree of a client or the server, its tensors by name, and functions that change them.

State that is kept, sent, stored or compared is always a mapping such as `{"model.head.weight": tensor, …}`. In memory
it is flat (core/flat_state.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

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


def tensors_of(part: Part) -> list[Tensor]:
    """Return a module's parameters followed by its buffers; a tensor is returned as a list of one."""
    return [part] if isinstance(part, Tensor) else [*part.parameters(), *part.buffers()]


def parameters_of(part: Part) -> list[Tensor]:
    """Return a module's parameters; a tensor is returned as a list of one."""
    return [part] if isinstance(part, Tensor) else list(part.parameters())


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in place, in few operations."""
    if not targets and not sources:
        return
    whole: tuple[list[Tensor], list[Tensor]] = ([], [])
    floating: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        to, from_ = floating if target.is_floating_point() else whole
        to.append(target)
        from_.append(source)
    for to, from_ in (floating, whole):  # a fused copy handles one kind of dtype
        if to:
            with torch.no_grad():
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
