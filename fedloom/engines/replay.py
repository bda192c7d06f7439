"""A CUDA graph on the CPU, for tests: a step's tensor operations are recorded once and replayed in the same memory.

What a recorded step cannot do is refused with the line that does it (see recording.py). A method that equals `inline`
here, bit for bit, is ready for the GPU.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedloom.core.batches import Indices, Plan
from fedloom.core.job import Job, Result, handle
from fedloom.core.workspace import Setup, StepCache, Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.recording import NoPythonReads, Watch, owned, refuse_rebound_parts, storage, undone


class Tape(Watch):
    """Records tensor operations with their memory; `replay` runs them again."""

    def __init__(self, owned: list[Tensor]):
        super().__init__(owned)
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []

    def saw(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Remembers the operation and which of its outputs are new memory."""
        read = {storage(t) for t in inputs}
        fresh = [(i, t) for i, t in enumerate(outputs) if storage(t) not in read]
        self.operations.append((func, args, kwargs, fresh))

    @torch.no_grad()
    def replay(self) -> None:
        """The same operations on whatever the memory holds now."""
        with torch.autocast("cpu", enabled=False):  # a method's own, around a fit, is in the operations already
            for func, args, kwargs, fresh in self.operations:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for i, tensor in fresh:
                    tensor.detach().copy_(again[i])


class Replay:
    """The stepper: warm up, record, undo, then replay for every batch of that size."""

    fixed_memory = True

    def run(self, lane: Workspace, site: StepCache, step: Callable[[Indices], None], plan: Plan) -> None:
        """Replays the tape of each batch's size, recording it at its first use."""
        refuse_rebound_parts(lane)
        for batch in plan.steps(lane.device):
            sizes = tuple(len(index) for index in batch)
            if sizes not in site.captures:
                site.captures[sizes] = self._record(lane, site, step, batch)
            tape, buffers = site.captures[sizes]
            for buffer, index in zip(buffers, batch, strict=True):
                buffer.copy_(index)
            tape.replay()
        refuse_rebound_parts(lane)

    def _record(
        self, lane: Workspace, site: StepCache, step: Callable[[Indices], None], batch: Indices
    ) -> tuple[Tape, Indices]:
        buffers = tuple(index.clone() for index in batch)
        with undone(lane, site):
            step(buffers)  # warm-up: statistics come into being
            with NoPythonReads(), Tape(owned(lane, site, buffers)) as tape:
                step(buffers)
        return tape, buffers


class ReplayEngine(Engine):
    """Clients take turns on several recording lanes (three unless `workers` says otherwise)."""

    name: ClassVar[str] = "replay"

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self.lanes = [
            Workspace(setup, stepper=Replay(), built=self.server_workspace.parts, precision=self.precision)
            for _ in range(settings.workers or 3)
        ]
        self._turn = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Each job in the next lane."""
        for job in jobs:
            self._turn += 1
            yield handle(self.lanes[self._turn % len(self.lanes)], job)
