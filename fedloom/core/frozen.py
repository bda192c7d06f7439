"""Frozen tensors (`model.freeze`, `model.lora`): which they are, and one copy of them for all workspaces."""

from collections.abc import Hashable, Iterator

from torch import nn

from fedloom.core.state import Parts, State, as_buffers, under

FrozenTensors = dict[Hashable, State]
"""Frozen tensors by name, for each device and memory layout."""


def fix_part(module: nn.Module) -> None:
    """Fix a module and everything in it: it is not trained, sent or kept, and stays in eval mode."""
    as_buffers(module)
    module.__dict__["stays_fixed"] = True


def fix_tensors(module: nn.Module) -> None:
    """Fix the tensors that a module itself has, but not those of its submodules. It stays in eval mode if it has any.

    So a dropout module inside of it, which has no tensors, is still in train mode during training.
    """
    as_buffers(module, inside=False)
    if module._buffers:
        module.__dict__["tensors_fixed"] = True


def is_fixed_itself(module: nn.Module) -> bool:
    """Return whether `fix_tensors` has fixed the module's tensors."""
    return bool(getattr(module, "tensors_fixed", False))


def fixed_paths(parts: Parts) -> tuple[str, ...]:
    """Return the paths of frozen modules and single frozen tensors."""
    return tuple(_paths(parts))


def _paths(parts: Parts) -> Iterator[str]:
    for path, module in parts.named_modules():
        if getattr(module, "stays_fixed", False):
            yield path
        elif is_fixed_itself(module):
            yield from (f"{path}.{name}" for name, tensor in module._buffers.items() if tensor is not None)


def share(parts: Parts, fixed: tuple[str, ...], common: State) -> None:
    """Let the frozen tensors of a tree use the memory of those in `common`; tensors that are missing there are added.

    The tensor objects stay the same.
    """
    for name, tensor in parts.named_tensors().items():
        if under(name, fixed):
            tensor.data = common.setdefault(name, tensor.detach())


def frozen_part(name: str, fixed: tuple[str, ...]) -> str | None:
    """Return the part to which a frozen tensor belongs, for messages; None if the tensor is not frozen.

    Single frozen tensors (`fix_tensors`) are those of a network's extractor beside its adapters: `model.extractor`.
    """
    owner = max((path for path in fixed if under(name, (path,))), key=len, default=None)
    return ".".join(name.split(".")[:2]) if owner == name else owner
