"""One client after another, in this process."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from fedloom.engines.base import Engine
from fedloom.job import Job, Result, attempt


class Inline(Engine):
    """The simplest engine, and the one that others must equal."""

    name: ClassVar[str] = "inline"
    gpu: ClassVar[bool] = True

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Each job in turn, eagerly, in the home lane."""
        for job in jobs:
            yield attempt(self.home, job)
