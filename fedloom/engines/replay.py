"""A CPU equivalent of CUDA graphs, for tests: records a step's tensor operations once and replays them in fixed memory.

Operations that a recorded step cannot contain are rejected, naming the line of code (see recording.py). A method whose
results here are bit-identical to `inline` is ready for the GPU.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedloom.core.batches import Row
from fedloom.core.execution import handle
from fedloom.core.job import Job, Result
from fedloom.core.setup import Setup
from fedloom.core.state import State
from fedloom.core.workspace import Steps, Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.recording import Watch, check, storage


class Tape(Watch):
    """Records tensor operations with their memory; `replay` executes them again."""

    def __init__(self, owned: list[Tensor]):
        super().__init__(owned)
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]], bool]] = []

    def record(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Store the operation, and which of its outputs are new memory."""
        if torch.Tag.inplace_view in func.tags:  # changes a tensor's shape, which later operations have recorded
            return
        read = {storage(t) for t in inputs}
        fresh = [(i, t.detach()) for i, t in enumerate(outputs) if storage(t) not in read]
        self.operations.append((func, args, kwargs, fresh, torch.is_grad_enabled()))

    @torch.no_grad()
    def replay(self) -> None:
        """Execute the recorded operations on the current contents of the memory."""
        with torch.autocast("cpu", enabled=False):  # a method's autocast around a fit is already part of the operations
            for func, args, kwargs, fresh, with_grad in self.operations:
                # Recurrent layers return what their backward needs only if gradients are enabled.
                with torch.set_grad_enabled(with_grad):
                    again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for i, tensor in fresh:
                    tensor.copy_(again[i])


class Replay:
    """A stepper that records each step once per batch size, undoes it, and replays it for all batches of that size."""

    fixed_memory = True

    def __init__(self) -> None:
        self._tapes: dict[Hashable, tuple[Tape, Row]] = {}

    def run(self, steps: Steps) -> State:
        """Replay the tape for each row's length, recording it on first use."""
        steps.workspace.refuse_rebound()
        steps.prepare()
        for row in steps.plan.steps(steps.workspace.device):
            known = (steps.cache.site, steps.cache.version, len(row))
            if known not in self._tapes:
                self._tapes[known] = self._record(steps, row)
            tape, buffer = self._tapes[known]
            buffer.copy_(row)
            tape.replay()
        steps.workspace.refuse_rebound()
        return steps.means()

    def _record(self, steps: Steps, row: Row) -> tuple[Tape, Row]:
        buffer = row.clone()
        return check(steps, buffer, Tape), buffer


class ReplayEngine(Engine):
    """Distributes clients over several recording workspaces (`workers`, three by default)."""

    name: ClassVar[str] = "replay"

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self.lanes = [
            Workspace(setup, stepper=Replay(), built=self.server_workspace.parts, precision=self.precision)
            for _ in range(settings.workers or 3)
        ]
        self._turn = 0

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run each job in the next workspace."""
        for job in jobs:
            self._turn += 1
            yield handle(self.lanes[self._turn % len(self.lanes)], job)
