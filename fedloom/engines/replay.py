"""A check for lanes on a CPU: lanes whose graphs are recorded tensor operations instead of CUDA graphs.

A step that a CUDA graph cannot contain is refused, naming the line of code (see recording.py). A method whose results
here are bit-identical to `inline` is ready for the GPU.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.core.execution import handle
from fedloom.core.job import Job, Result
from fedloom.core.setup import Setup
from fedloom.core.torch_internals import DispatchMode
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.cuda.graphs import Work
from fedloom.engines.cuda.lane import Lane, Shared
from fedloom.engines.recording import NoPythonReads, Watch, storage


class Tape(DispatchMode):
    """Records tensor operations with their memory; `replay` executes them again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operations such as transpose_ change the shape of a tensor object: keep what it was.
        given, named = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # changes a tensor's shape, which later operations have recorded
            return out
        read = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [(i, t.detach()) for i, t in enumerate(outputs) if storage(t) not in read]
        self._operations.append((func, given, named, fresh, torch.is_grad_enabled()))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Execute the recorded operations on the current contents of the memory."""
        with torch.autocast("cpu", enabled=False):  # a method's autocast around a fit is already part of the operations
            for func, args, kwargs, fresh, with_grad in self._operations:
                # Recurrent layers return what their backward needs only if gradients are enabled.
                with torch.set_grad_enabled(with_grad):
                    again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for i, tensor in fresh:
                    tensor.copy_(again[i])


class Tapes:
    """Records work on a CPU, as `Graphs` does on a GPU."""

    def capture(self, work: Work) -> Work:
        """Record the work and return its replay.

        Raises:
            CaptureError: The work contains something that cannot be captured.
        """
        with NoPythonReads(), Watch(), Tape() as tape:
            work()
        replay: Work = tape.replay
        return replay

    def settle(self) -> None:
        """Do nothing: on a CPU all work is done when it returns."""


class ReplayEngine(Engine):
    """Distributes clients over several lanes (`workers`, three by default), each with a lane for every network."""

    name: ClassVar[str] = "replay"

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        networks = [(like, Shared(strict=True)) for like in self.server_workspace.variants]
        self._lanes = [
            [Lane(partial(self._workspace, like), Tapes(), shared) for like, shared in networks]
            for _ in range(settings.workers or 3)
        ]
        self._turn = 0

    def _workspace(self, like: Workspace, **options: Any) -> Workspace:
        """Return a workspace for the same network, with the same initial values."""
        made = Workspace(like.setup, stored=like.stored, built=like.parts, precision=self.precision, **options)
        made.start_from(like.initial)
        return made

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run each job in the next lane."""
        for job in jobs:
            self._turn += 1
            lane = self._lanes[self._turn % len(self._lanes)][self.setup.kind_of(job.client)]
            yield handle(lane.workspaces[0], job)
