"""The engine that runs one client after another in this process."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from fedloom.core.execution import launch
from fedloom.core.job import Job, Result
from fedloom.engines.base import Engine, channels_last_hint


class Inline(Engine):
    """The simplest engine, and the reference for the others."""

    name: ClassVar[str] = "inline"
    gpu: ClassVar[bool] = True

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run each job eagerly in the server's workspace."""
        for job in jobs:
            yield launch(self.server_workspace, job).read()

    def hints(self) -> list[str]:
        """Return the hint about the memory layout of convolutions."""
        return channels_last_hint(self)
