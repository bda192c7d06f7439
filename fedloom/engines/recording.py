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

from fedloom.core.state import tensors_of
from fedloom.core.workspace import StepCache, Workspace

HOST_READS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
        "is_nonzero", "equal",
    )
}  # fmt: skip
COPIES = {"aten::_to_copy", "aten::copy_"}
PYTHON_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class CaptureError(RuntimeError):
    """A step does what cannot be recorded."""


class Watch(TorchDispatchMode):
    """Lets tensor operations pass, and refuses with the line that does it what a recorded step cannot do.

    That is: reading a value on the host, memory that is not the lane's, the global random generator.
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
        self._refuse_global_randomness(func, args, kwargs)
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

    def _refuse_global_randomness(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if not any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise CaptureError(
                f"{line()} draws from the global random generator ({func}); use fedloom's Dropout, or pass a generator"
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


def owned(lane: Workspace, site: StepCache, indices: tuple[Tensor, ...]) -> list[Tensor]:
    """All memory that a step of this lane and call site may touch."""
    return [*written(lane, site), *read_only(lane, site), *indices]


def written(lane: Workspace, site: StepCache) -> list[Tensor]:
    """What a step writes: parts, statistics, optimizer state."""
    return [*site.written(), *tensors_of(lane.parts)]


def read_only(lane: Workspace, site: StepCache) -> list[Tensor]:
    """What a step only reads, besides its indices."""
    return [site.lr, *tensors_of(lane.received), *lane.pixels.tensors(), *(site.data or ())]


@contextmanager
def undone(lane: Workspace, site: StepCache) -> Iterator[None]:
    """Whatever steps do inside leaves no trace: parts, buffers, optimizer state, statistics, the generator's place."""
    random = lane.generator.get_state()
    before = {id(t): t.detach().clone() for t in written(lane, site)}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in written(lane, site):
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:  # a statistic that came into being
                    tensor.zero_()
        lane.generator.set_state(random)


def refuse_rebound_parts(lane: Workspace) -> None:
    """Parts must stay where they were recorded."""
    if moved := lane.moved():
        raise CaptureError(f"part '{moved}' was rebound (p.data = … or an assignment): write in place, copy_")
