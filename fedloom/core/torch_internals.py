"""Private functions of torch that fedloom uses, each with its purpose. A test calls every one."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx
from torch.utils._python_dispatch import TorchDispatchMode

# One kernel launch for a list of tensors.
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_sub_ = torch._foreach_sub_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_sqrt = torch._foreach_sqrt
foreach_addcmul_ = torch._foreach_addcmul_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_norm = torch._foreach_norm
foreach_sign = torch._foreach_sign


def make_fx(function: Callable[..., Any], **options: Any) -> Callable[..., torch.fx.GraphModule]:
    """Return a function that traces `function` into a graph of tensor operations."""
    made: Callable[..., torch.fx.GraphModule] = _make_fx(function, **options)
    return made


def decompositions() -> Any:
    """Return decompositions of operations whose schemas do not declare what they write to."""
    return get_decompositions([torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward])


def compile_graph(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph with torch's inductor for inputs of these shapes (tens of seconds; compiled code is cached).

    The inputs may be views of one storage if they do not overlap: the compiler is given fake inputs with separate
    storages.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())  # inductor caches nothing without a ShapeEnv
    with mode:
        apart = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
    with tracing(TracingContext(mode)):
        compiled: Callable[..., Any] = compile_fx(graph, apart)  # type: ignore[assignment]
    return compiled


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler does not trace.

    The compiler is not imported for it: its 800 modules take 1 s.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch would import its compiler to exclude `__torch_dispatch__` from it."""
        return False

    def __enter__(self) -> Any:
        """Activate the mode; `__torch_dispatch__` is excluded from the compiler if that has been imported."""
        mode = type(self)
        if "torch._dynamo" in sys.modules and not hasattr(mode.__torch_dispatch__, "__wrapped__"):
            mode.__torch_dispatch__ = torch._disable_dynamo(mode.__torch_dispatch__, recursive=True)  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]


def end_allocate_to_pool(device: int, pool: Any) -> None:
    """Make the allocator leave a graph's memory pool, after a capture that failed."""
    torch._C._cuda_endAllocateToPool(device, pool)


def contexts_open() -> bool:
    """Return whether a torch function mode or dispatch mode is active in this thread."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


def resolve_overload(name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Return the overload of an aten operation that matches these arguments."""
    found: str = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    return found


def has_batching_rule(operation: Any) -> bool:
    """Return whether vmap supports an operation."""
    known: bool = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "FuncTorchBatched")
    return known


def vmap_level(tensor: Tensor) -> int:
    """Return the level of the vmap that a batched tensor belongs to."""
    level: int = _functorch.maybe_get_level(tensor)
    return level


def transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is inside a transformation of torch.func, such as vmap."""
    inside: bool = _functorch.is_functorch_wrapped_tensor(tensor)
    return inside


def unbatched(tensor: Tensor) -> Tensor | None:
    """Return all rows of a tensor inside vmap, with rows first; None if the tensor is not batched."""
    if not _functorch.is_batchedtensor(tensor):
        return None
    return _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)


def rebatched(tensor: Tensor, level: int) -> Tensor:
    """Return rows as a batched tensor: the inverse of `unbatched`."""
    made: Tensor = _functorch._add_batch_dim(tensor, 0, level)
    return made
