"""What a recorded step may not do, and how recording leaves no trace. Shared by the CPU's tape and by CUDA graphs."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.core.fit import CaptureError as CaptureError
from fedloom.core.state import tensors_of
from fedloom.core.step_cache import distinct
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


class Watch(TorchDispatchMode):
    """Lets tensor operations pass, and refuses with the line that does it what a recorded step cannot do.

    That is: reading a value on the host, memory that is not the workspace's, torch's random generators.
    """

    def __init__(self, owned: list[Tensor]):
        TorchDispatchMode.__init__(self)
        self._owned = {storage(t) for t in owned}
        self._device = owned[0].device.type
        self._alive = owned  # a freed tensor's address could come back as somebody else's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse_host_reads(func, args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse_host_writes(func, inputs)
        self._refuse_foreign_memory(func, inputs)
        self._refuse_generators(func)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._alive.extend(outputs)
        self._owned |= {storage(t) for t in outputs}
        self.saw(func, args, kwargs, inputs, outputs)
        return out

    def saw(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """An operation that was allowed and has been done."""

    def _refuse_host_reads(self, func: Any, args: Any) -> None:
        if func._schema.name in HOST_READS:
            raise CaptureError(f"{line()} reads a tensor's value on the host ({func}); use torch.where and masks")
        if str(func).startswith("aten.index.") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise CaptureError(f"{line()} indexes with a boolean mask: its size is not known; use torch.where")

    def _refuse_host_writes(self, func: Any, inputs: list[Tensor]) -> None:
        if func._schema.name in COPIES and len({t.device.type for t in inputs} | {self._device}) > 1:
            raise CaptureError(f"{line()} brings a value from the host to the GPU ({func}); make it a part in build()")

    def _refuse_foreign_memory(self, func: Any, inputs: list[Tensor]) -> None:
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(…) written inside the step: a constant of the code
            return
        if any(storage(t) not in self._owned for t in inputs):
            raise CaptureError(
                f"{line()} reads a tensor that is no part, batch, received part or learning rate ({func}); "
                "what a step reads must be a part that build() returns"
            )

    def _refuse_generators(self, func: Any) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        raise CaptureError(
            f"{line()} draws from one of torch's random generators ({func}); use fedloom's Dropout, or client.random"
        )


class NoPythonReads(TorchFunctionMode):
    """Refuses ways to a tensor's values that are no tensor operations, so that a tape does not see them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PYTHON_READS:
            raise CaptureError(f"{line()} reads a tensor's values in Python ({func.__name__}); use tensor operations")
        return func(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    """What identifies a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def line() -> str:
    """Where in the method's (or the user's) code this happened: the innermost frame outside torch and the engine."""
    inner = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inner) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}, line {frame.lineno}, `{frame.line}`:"
    return "a step:"


def touched(steps: Steps) -> list[Tensor]:
    """Every tensor that a step may read or write, besides its row: each once."""
    workspace = steps.workspace
    return distinct(
        (
            *steps.cache.tensors(), *tensors_of(workspace.parts), *tensors_of(workspace.received),
            *workspace.pixels.tensors(), workspace.random.counters,
        )
    )  # fmt: skip


@contextmanager
def undone(*all_steps: Steps) -> Iterator[None]:
    """Whatever steps do inside leaves no trace: parts, buffers, optimizer state, statistics."""
    written = [t for s in all_steps for t in (*s.workspace.flat.buffers.values(), *s.cache.flat())]
    before = [tensor.clone() for tensor in written]
    try:
        yield
    finally:
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)


def check(steps: Steps, row: Tensor) -> None:
    """Takes a step twice under the checks: what cannot be recorded raises CaptureError, nothing is changed."""
    with undone(steps):
        steps.step(row)  # libraries load what they need
        with NoPythonReads(), Watch([*touched(steps), row]):
            steps.step(row)
