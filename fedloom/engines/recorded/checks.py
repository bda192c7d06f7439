"""Checks of what a recorded step may do, and recording without side effects."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedloom.core.fit import CaptureError as CaptureError
from fedloom.core.state import copy_all_, tensors_of
from fedloom.core.step_cache import distinct
from fedloom.core.torch_internals import DispatchMode
from fedloom.core.workspace import Steps

HOST_READS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
        "is_nonzero", "equal",
    )
}  # fmt: skip
COPIES = {"aten::_to_copy", "aten::copy_"}
PYTHON_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class Watch(DispatchMode):
    """Executes tensor operations, and rejects operations that a recorded step cannot contain, naming the line of code.

    These are: reading a value on the host, torch's random generators, and memory outside of the workspace.

    Args:
        owned: The tensors that the operations may read. Default: any.
    """

    def __init__(self, owned: list[Tensor] | None = None):
        super().__init__()
        self._owned = None if owned is None else {storage(t) for t in owned}
        self._alive = owned or []  # keeps tensors alive, since the address of a freed one could be reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse_host_reads(func, args)
        self._refuse_generators(func, args, kwargs)
        if self._owned is None:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse_host_writes(func, inputs)
        self._refuse_foreign_memory(func, inputs, self._owned)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._alive.extend(outputs)
        self._owned |= {storage(t) for t in outputs}
        return out

    def _refuse_host_reads(self, func: Any, args: Any) -> None:
        if func._schema.name in HOST_READS:
            raise CaptureError(f"{line()} reads a tensor's value on the host ({func}); use torch.where and masks")
        if str(func).startswith("aten.index.") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise CaptureError(f"{line()} indexes with a boolean mask: the result's size is not fixed; use torch.where")

    def _refuse_host_writes(self, func: Any, inputs: list[Tensor]) -> None:
        if func._schema.name in COPIES and len({t.device.type for t in (*inputs, self._alive[0])}) > 1:
            raise CaptureError(f"{line()} copies a value from the host to the GPU ({func}); make it a part in build()")

    def _refuse_foreign_memory(self, func: Any, inputs: list[Tensor], owned: set[int]) -> None:
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(…) inside the step: a constant of the code
            return
        if any(storage(t) not in owned for t in inputs):
            raise CaptureError(
                f"{line()} reads a tensor that is not a part, batch, received part or learning rate ({func}); "
                "make it a part that build() returns"
            )

    def _refuse_generators(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if "dropout_p" in names and not given.get("dropout_p"):  # attention without dropout draws nothing
            return
        raise CaptureError(f"{line()} uses torch's random generator ({func}); use fedloom's Dropout, or client.random")


class NoPythonReads(TorchFunctionMode):
    """Rejects reads of a tensor's values that are not tensor operations and would not be recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PYTHON_READS:
            raise CaptureError(f"{line()} reads a tensor's values in Python ({func.__name__}); use tensor operations")
        return func(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def line() -> str:
    """Return the current line of the method's (or user's) code: the innermost frame outside torch and engines."""
    inner = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inner) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}, line {frame.lineno}, `{frame.line}`:"
    return "a step:"


def touched(steps: Steps) -> list[Tensor]:
    """Return every tensor that a step may read or write besides its row, each once."""
    workspace = steps.workspace
    return distinct(
        (
            *steps.cache.tensors(), *tensors_of(workspace.parts), *tensors_of(workspace.received),
            *workspace.stored.tensors(), *workspace.features, workspace.random.counters,
        )
    )  # fmt: skip


def written(steps: Steps) -> list[Tensor]:
    """Return the memory that a step may write: parts, buffers, optimizer state, statistics."""
    return [*steps.workspace.flat.buffers.values(), *steps.cache.flat()]


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors at the end of the context."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        copy_all_(tensors, before)


def undone(steps: Steps) -> AbstractContextManager[None]:
    """Return a context that undoes all changes that steps make inside."""
    return restored(written(steps))


def check(steps: Steps, row: Tensor) -> None:
    """Take a step twice, the second time under the checks, and undo it.

    Raises:
        CaptureError: The step cannot be recorded.
    """
    with undone(steps):
        steps.step(row)  # warm-up: libraries initialise themselves
        with NoPythonReads(), Watch([*touched(steps), row]):
            steps.step(row)
