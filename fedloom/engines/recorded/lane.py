"""A lane: runs clients in steps that are recorded once and repeated, as CUDA graphs or on a CPU."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from fedloom.core.execution import launch
from fedloom.core.flat_state import FlatState
from fedloom.core.job import Job, Result
from fedloom.core.state import State
from fedloom.core.workspace import Steps, Workspace
from fedloom.engines.recorded.checks import CaptureError, check, restored, touched, undone, written
from fedloom.engines.recorded.recorder import Feed, Recorder, Work
from fedloom.engines.recorded.tracing import Function, compiled, trace

GRAPHS = 64
"""Maximum number of graphs per lane; the least recently used one is dropped."""
CAPACITY = 8192
"""Initial capacity of an index buffer, in values."""

NewWorkspace = Callable[..., Workspace]
StepFunction = Callable[[Tensor], None]
"""Takes one training step of all clients, given a `Row` (random key and sample positions) of each [clients, row]."""


@dataclass(frozen=True)
class StepRun:
    """Consecutive steps with the same call site, number of clients and batch size."""

    key: Hashable
    function: Callable[[], StepFunction]
    """Returns the function to capture."""
    clients: int
    width: int
    """Number of values in a client's `Row`."""
    written: Callable[[], list[Tensor]]
    """Returns the memory that the steps may write."""


@dataclass
class Shared:
    """State that the lanes of an engine share, by call site."""

    compile: bool = False
    strict: bool = False
    """Capture every step; one that cannot be captured is an error. Otherwise it runs eagerly."""
    checked: set[Hashable] = field(default_factory=set)
    """Call sites whose steps can be captured."""
    eager: set[Hashable] = field(default_factory=set)
    """Call sites whose steps cannot be captured and run eagerly."""
    traced: dict[Hashable, fx.GraphModule] = field(default_factory=dict)
    functions: dict[Hashable, Function | None] = field(default_factory=dict)
    """Vectorised or compiled steps; None if that is not possible."""

    def run_eagerly(self, steps: Steps, error: Exception) -> None:
        """Stop capturing this call site, with a warning."""
        if self.strict:
            raise error
        if steps.cache.site not in self.eager:
            self.eager.add(steps.cache.site)
            warnings.warn(f"a training step cannot be recorded and runs eagerly: {error}", stacklevel=2)


class Lane:
    """Runs one client at a time in a workspace whose steps are captured once per call site and batch size.

    It is the stepper of its workspace.
    """

    fixed_memory = True

    def __init__(self, new_workspace: NewWorkspace, recorder: Recorder, shared: Shared):
        self.shared, self.recorder = shared, recorder
        self._graphs: dict[Hashable, Work] = {}
        self._seen: set[Hashable] = set()
        """Single steps that occurred once; they are captured when they occur again."""
        self._feed: Feed | None = None
        self.workspaces = self._make_workspaces(new_workspace)

    def _make_workspaces(self, new_workspace: NewWorkspace) -> list[Workspace]:
        return [new_workspace(stepper=self)]

    def launch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs without waiting for the device."""
        return [launch(self.workspaces[0], job) for job in jobs]

    def largest(self, results: Sequence[Result]) -> Tensor | None:
        """Return the largest magnitude in each message; None if messages are encoded."""
        sent = [r.message.tensors for r in results if r.message is not None]
        flat = [state.floating() for state in sent if isinstance(state, FlatState)]
        if not flat or len(flat) < len(sent) or not flat[0]:
            return None
        return torch.stack([largest(buffers) for buffers in flat])

    def run(self, steps: Steps) -> State:
        """Take one client's steps as CUDA graphs."""
        steps.workspace.refuse_rebound()
        steps.prepare()
        if steps.plan.sizes:
            self._take_steps(steps)
        steps.workspace.refuse_rebound()
        return steps.means()

    def _take_steps(self, steps: Steps) -> None:
        if not self.can_capture(steps):
            for row in steps.plan.steps(steps.workspace.device):
                steps.step(row)
            return
        runs = list(steps.plan.runs())
        self.fill([steps.plan.part(*run) for run in runs])
        for start, size, count in runs:
            key = (steps.cache.site, steps.cache.version, size, steps.plan.batches)
            width = 1 + size * steps.plan.batches

            def step(key: Hashable = key, start: int = start, size: int = size, count: int = count) -> StepFunction:
                return self._alone(steps, key, start, size, count)

            self.take(StepRun(key, step, 1, width, lambda: written(steps)), count)

    def can_capture(self, steps: Steps) -> bool:
        """Return whether a call's steps can be captured; checked once with one step, which is undone."""
        site = steps.cache.site
        if site not in self.shared.checked and site not in self.shared.eager:
            try:
                check(steps, next(steps.plan.steps(steps.workspace.device)))
                self.shared.checked.add(site)
            except CaptureError as error:
                self.shared.run_eagerly(steps, error)
        return site in self.shared.checked

    def _alone(self, steps: Steps, key: Hashable, start: int, size: int, count: int) -> StepFunction:
        """Return the step of one client: the method's code, or a compiled version if it is taken more than once."""
        if not self.shared.compile:
            return lambda rows: steps.step(rows[0])
        if key not in self.shared.functions and count > 1:
            row = torch.from_numpy(steps.plan.part(start, size, 1)[0]).to(steps.workspace.device)
            graph = trace(steps, row)
            with undone(steps):
                self.shared.functions[key] = compiled(graph, [*touched(steps), row])
        function = self.shared.functions.get(key)
        if function is None:
            return lambda rows: steps.step(rows[0])
        alone = bound(function, [tensor.detach() for tensor in touched(steps)])
        return lambda rows: alone(rows[0])

    def fill(self, rows: list[np.ndarray]) -> None:
        """Set the rows of all steps that `take` is about to take."""
        needed = sum(part.size for part in rows)
        if self._feed is None or self._feed.capacity < needed:
            self.recorder.settle()
            self._graphs.clear()
            self._feed = Feed(max(CAPACITY, 2 * needed), self.workspaces[0].device)
        self._feed.fill(rows)

    def seek(self, position: int) -> None:
        """Set the position in the index buffer from which the next steps read their rows."""
        assert self._feed is not None
        self._feed.seek(position)

    def take(self, run: "StepRun", count: int) -> None:
        """Take `count` steps of one kind, several per graph."""
        for many in self.recorder.unroll:
            while count >= many:
                self._replay(run, many)
                count -= many

    def _replay(self, run: "StepRun", count: int) -> None:
        feed, key = self._feed, (run.key, count)
        assert feed is not None
        graph = self._graphs.pop(key, None)
        if graph is None:
            function = run.function()

            def work() -> None:
                for rows in feed.take(count, run.clients, run.width):
                    function(rows)

            if count == 1 and key not in self._seen and not self.shared.strict:
                self._seen.add(key)
                work()
                return
            with restored(run.written()):
                with restored([feed.position]):
                    work()  # warm-up: libraries initialise themselves
                with restored([feed.position]):
                    graph = self._captured(work)
        self._graphs[key] = graph  # last position: the most recently used
        if len(self._graphs) > GRAPHS:
            self.recorder.settle()
            del self._graphs[next(iter(self._graphs))]
        graph()

    def _captured(self, work: Work) -> Work:
        try:
            return self.recorder.capture(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.shared.strict:
                raise
            warnings.warn(f"training steps cannot be recorded and run eagerly: {error}", stacklevel=2)
            return work


def bound(function: Function, tensors: Sequence[Tensor]) -> StepFunction:
    """Return a traced step with these tensors as its arguments; the last one is the row, or the rows of clients."""

    def step(rows: Tensor) -> None:
        with torch.no_grad():
            function(*tensors, rows)

    return step


def largest(buffers: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each row of the buffers; NaN for rows that contain one."""
    each = [torch.linalg.vector_norm(buffer.float(), torch.inf, dim=-1) for buffer in buffers]
    return torch.stack(each).amax(0) if len(each) > 1 else each[0]
