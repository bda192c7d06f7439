"""An engine maps jobs to results. It owns devices and processes, and knows no method by name."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedloom.errors import UserError
from fedloom.job import Job, Result
from fedloom.lane import Lane, Setup

ENGINES: dict[str, type["Engine"]] = {}


class EngineSettings(BaseModel):
    """Where and how fast; never what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("inline", description="inline, processes, or replay (a check that steps can be recorded)")
    workers: int | None = Field(None, ge=1, description="worker processes, or lanes; default: one per core")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where the engine can use one")


class Engine(ABC):
    """Runs jobs; results come back in the order of the jobs, whoever finished first."""

    name: ClassVar[str]
    gpu: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ENGINES[cls.name] = cls

    def __init__(self, setup: Setup, settings: EngineSettings):
        self.setup = setup
        self.settings = settings
        self.device = self._device()
        # Two threads in one process collapse when the other core is busy; and one gives the same sums everywhere.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.home = Lane(setup, device=self.device)
        """Where the server works."""

    def _device(self) -> torch.device:
        wanted = self.settings.device
        if wanted == "cuda" and not self.gpu:
            raise UserError(
                f"engine.device = 'cuda': the engine '{self.name}' works on CPUs; use engine.name = 'inline'"
            )
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device = 'cuda': torch sees no CUDA device; use engine.device = 'cpu'")
        cuda = wanted == "cuda" or (wanted == "auto" and self.gpu and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Does the jobs; yields their results in the same order. Give the longest first."""

    def close(self) -> None:
        """Gives back what it holds."""
        torch.set_num_threads(self._threads)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
