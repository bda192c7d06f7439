"""A CUDA graph on the CPU, for tests: a step's tensor operations are recorded once and replayed in the same memory.

What a recorded step cannot do is refused with the line that does it: reading a value on the host, memory that is not
the lane's, the global random generator. A method that equals `inline` here, bit for bit, is ready for the GPU.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.engines.base import Engine, EngineSettings
from fedloom.job import Job, Result, perform
from fedloom.lane import Indices, Lane, Setup, Site
from fedloom.parts import tensors_of

HOST_READS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
        "is_nonzero", "equal",
    )
}  # fmt: skip
PYTHON_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class CaptureError(RuntimeError):
    """A step does what cannot be recorded."""


class Tape(TorchDispatchMode):
    """Records tensor operations with their memory; `replay` runs them again."""

    def __init__(self, owned: list[Tensor]):
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._owned = {_storage(t) for t in owned}
        self._alive = owned  # a freed tensor's address could come back as somebody else's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse_host_reads(func, args)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse_foreign_memory(func, inputs)
        self._refuse_global_randomness(func, args, kwargs)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._alive.extend(outputs)
        self._owned |= {_storage(t) for t in outputs}
        read = {_storage(t) for t in inputs}
        fresh = [(i, t) for i, t in enumerate(outputs) if _storage(t) not in read]
        self.operations.append((func, args, kwargs, fresh))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """The same operations on whatever the memory holds now."""
        for func, args, kwargs, fresh in self.operations:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for i, tensor in fresh:
                tensor.detach().copy_(again[i])

    def _refuse_host_reads(self, func: Any, args: Any) -> None:
        if func._schema.name in HOST_READS:
            raise CaptureError(f"{_line()} reads a tensor's value on the host ({func}); use torch.where and masks")
        if str(func).startswith("aten.index.") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise CaptureError(f"{_line()} indexes with a boolean mask: its size is not known; use torch.where")

    def _refuse_foreign_memory(self, func: Any, inputs: list[Tensor]) -> None:
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(…) written inside the step: a constant of the code
            return
        if any(_storage(t) not in self._owned for t in inputs):
            raise CaptureError(
                f"{_line()} reads a tensor that is no part, batch, received part or learning rate ({func}); "
                "what a step reads must be a part that build() returns"
            )

    def _refuse_global_randomness(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if not any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise CaptureError(
                f"{_line()} draws from the global random generator ({func}); use fedloom's Dropout, or pass a generator"
            )


class NoPythonReads(TorchFunctionMode):
    """Refuses ways to a tensor's values that are no tensor operations, so that a tape does not see them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PYTHON_READS:
            raise CaptureError(f"{_line()} reads a tensor's values in Python ({func.__name__}); use tensor operations")
        return func(*args, **(kwargs or {}))


class Replay:
    """The stepper: warm up, record, undo, then replay for every batch of that size."""

    fixed_memory = True

    def run(self, lane: Lane, site: Site, step: Callable[[Indices], None], batches: Iterator[Indices]) -> int:
        """Replays the tape of each batch's size, recording it at its first use."""
        self._refuse_rebound_parts(lane)
        count = 0
        for batch in batches:
            sizes = tuple(len(index) for index in batch)
            if sizes not in site.captures:
                site.captures[sizes] = self._record(lane, site, step, batch)
            tape, buffers = site.captures[sizes]
            for buffer, index in zip(buffers, batch, strict=True):
                buffer.copy_(index)
            tape.replay()
            count += 1
        self._refuse_rebound_parts(lane)
        return count

    def _record(self, lane: Lane, site: Site, step: Callable[[Indices], None], batch: Indices) -> tuple[Tape, Indices]:
        buffers = tuple(index.clone() for index in batch)
        random = lane.generator.get_state()
        before = {id(t): t.detach().clone() for t in (*site.written(), *tensors_of(lane.parts))}
        step(buffers)  # warm-up: statistics come into being
        written = [*site.written(), *tensors_of(lane.parts)]
        reads = [site.lr, *buffers, *tensors_of(lane.received), *lane.pixels.tensors(), *(site.data or ())]
        with NoPythonReads(), Tape([*written, *reads]) as tape:
            step(buffers)
        with torch.no_grad():
            for tensor in written:
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:
                    tensor.zero_()
        lane.generator.set_state(random)
        return tape, buffers

    def _refuse_rebound_parts(self, lane: Lane) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in lane.parts.named_tensors().items()}
        known = lane.__dict__.setdefault("addresses", addresses)
        moved = [name for name, address in addresses.items() if known.get(name) != address]
        if moved:
            raise CaptureError(f"part '{moved[0]}' was rebound (p.data = … or an assignment): write in place, copy_")


class ReplayEngine(Engine):
    """Clients take turns on several recording lanes (three unless `workers` says otherwise)."""

    name: ClassVar[str] = "replay"

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self.lanes = [Lane(setup, stepper=Replay(), built=self.home.parts) for _ in range(settings.workers or 3)]
        self._turn = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Each job in the next lane."""
        for job in jobs:
            self._turn += 1
            yield perform(self.lanes[self._turn % len(self.lanes)], job)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _line() -> str:
    """Where in the method's (or the user's) code this happened: the innermost frame outside torch and the engine."""
    inner = (str(Path(torch.__file__).parent), __file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inner) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}, line {frame.lineno}, `{frame.line}`:"
    return "a step:"
