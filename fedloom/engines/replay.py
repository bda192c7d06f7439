"""A check for lanes on a CPU: lanes whose graphs are recorded tensor operations instead of CUDA graphs.

A step that a CUDA graph cannot contain is refused, naming the line of code (see recording.py). A method whose results
here are bit-identical to `inline` is ready for the GPU.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

from fedloom.core.execution import handle
from fedloom.core.job import Job, Result
from fedloom.core.setup import Setup
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine, EngineSettings
from fedloom.engines.recorded.lane import Lane, Shared
from fedloom.engines.recorded.tape import Tapes


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
