"""The engine that runs clients in this process: one after another, or several per training step."""

import warnings
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import ClassVar

import torch

from fedloom.core.errors import UserError, brief
from fedloom.core.execution import launch
from fedloom.core.job import Job, Result
from fedloom.core.setup import Setup
from fedloom.core.workspace import Workspace
from fedloom.engines.base import Engine, EngineSettings, channels_last_hint, cohort_hint, per_round
from fedloom.engines.recorded.cohort import Cohort
from fedloom.engines.recorded.lane import Shared
from fedloom.engines.recorded.tape import Tapes

LONGEST = 2
"""Maximum number of jobs that a cohort is given at a time, as a multiple of its clients. More keep rows busy if clients
have different sizes, but their messages take memory."""


class Inline(Engine):
    """One client after another, the reference for the other engines; on a CPU also several at a time (`cohort`)."""

    name: ClassVar[str] = "inline"
    gpu: ClassVar[bool] = True
    vectorises: ClassVar[bool] = True

    def __init__(self, setup: Setup, settings: EngineSettings):
        super().__init__(setup, settings)
        self._cohort: Cohort | None = None
        wanted = settings.clients_per_step
        if wanted > 1 and self.device.type != "cpu":
            raise UserError(
                f"engine.cohort = {wanted}: the engine 'inline' vectorises clients on a CPU only; use "
                "engine.name = 'lanes' on a GPU"
            )
        if (clients := min(wanted, per_round(setup))) > 1:  # each client has a row of memory
            self._cohort = Cohort(clients, self._workspace, Tapes(unroll=(1,), records_single=False), Shared())

    def _workspace(self, **options: object) -> Workspace:
        return Workspace(
            self.setup, stored=self.server_workspace.stored, built=self.server_workspace.parts,
            precision=self.precision, **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run each job in the server's workspace, or several at a time in the rows of a cohort."""
        if self._cohort is None:
            for job in jobs:
                yield launch(self.server_workspace, job).read()
            return
        for _, alike in groupby(jobs, lambda job: job.kind):
            while batch := list(islice(alike, LONGEST * self._cohort.slots)):
                yield from (result.read() for result in self._launch(self._cohort, batch))

    def _launch(self, cohort: Cohort, jobs: list[Job]) -> list[Result]:
        """Run jobs in a cohort; repeat them one by one if a shared step fails, perhaps because of one client."""
        try:
            return cohort.launch(jobs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(
                f"engine.cohort: {len(jobs)} clients run one by one, because a training step failed: {brief(error)}",
                stacklevel=2,
            )
        return [launch(self.server_workspace, job) for job in jobs]

    def hints(self) -> list[str]:
        """Return settings that would be faster."""
        return [*channels_last_hint(self), *cohort_hint(self, per_round(self.setup))]
