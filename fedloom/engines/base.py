"""An engine maps jobs to results. It owns devices and processes, and knows no method by name."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field

from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.registry import Registry, subclass_of
from fedloom.core.workspace import Precision, Setup, Workspace


def _head(address: str | None) -> str | None:
    if address is None or address == "auto" or re.fullmatch(r"[^\s/]+:\d+", address):
        return address
    raise ValueError(f"'{address}' is no address: write host:port as `ray start --head` printed it, or auto")


class EngineSettings(Section):
    """Where and how fast; never what."""

    name: str = Field(
        "auto",
        description="auto (lanes on a GPU, else inline), inline, processes, lanes, ray, or replay (a check for lanes)",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="worker processes (default: one per core), Ray workers (default: all that the cluster holds), or "
        "lanes (default: 8, 4 for large networks, 1 or 2 where steps are vectorised over clients)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where the engine can use one")
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32", description="of products on a GPU: tf32 keeps 10 bits of their inputs; bf16 is autocast"
    )
    channels_last: bool = Field(False, description="images and convolutions with channels last in memory")
    deterministic: bool = Field(False, description="bit-identical reruns on a GPU too (CPUs always give them)")
    compile: bool = Field(False, description="lanes: torch.compile for training steps; pays off in long runs")
    cohort: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="lanes: number of clients vectorised per training step; chosen by clients' sizes, network "
        "size and free memory unless given; 1 takes them one by one",
    )
    client_timeout: float | None = Field(
        None,
        gt=0,
        description="processes, ray: a client whose update takes longer, in seconds, is left out of the round, its "
        "worker replaced; other engines cannot stop a client, and refuse it",
    )
    address: Annotated[str | None, AfterValidator(_head)] = Field(
        None, description="ray: host:port of a cluster's head, or auto; by default Ray is started here, for the run"
    )
    worker_cpus: float = Field(1, gt=0, description="ray: CPUs that a worker occupies")
    worker_gpus: float = Field(0, ge=0, description="ray: GPUs that a worker occupies; above 0 it runs lanes there")
    lost_after: float = Field(
        60, gt=0, description="ray: a worker that is silent for so many seconds is lost; another does its jobs"
    )


class Engine(ABC):
    """Runs jobs; results come back in the order of the jobs, whoever finished first."""

    name: ClassVar[str]
    gpu: ClassVar[bool] = False
    can_stop_clients: ClassVar[bool] = False
    """Whether a client that takes too long can be ended: a process can, a thread cannot."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            ENGINES.add(cls.name, cls)

    def __init__(self, setup: Setup, settings: EngineSettings):
        self.setup = setup
        self.settings = settings
        self.device = self._device()
        self.precision = self._precision()
        self._undo = ExitStack()
        _set_flags(
            self._undo,
            cuda=self.device.type == "cuda",
            tf32=settings.precision != "float32",
            deterministic=settings.deterministic,
        )
        self.server_workspace = Workspace(setup, device=self.device, precision=self.precision)
        """Where the server works."""

    def _device(self) -> torch.device:
        wanted = self.settings.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device = 'cuda': torch sees no CUDA device; use engine.device = 'cpu'")
        cuda = wanted == "cuda" or (wanted == "auto" and self.gpu and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")

    def _precision(self) -> Precision:
        precision = self.settings.precision
        if precision != "float32" and self.device.type == "cpu":
            raise UserError(f"engine.precision = '{precision}' is for GPUs, and this runs on a CPU; use float32")
        return Precision(bf16=precision == "bf16", channels_last=self.settings.channels_last)

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Does the jobs; yields their results in the same order, failures too. Give the longest first."""

    def choice(self) -> dict[str, int]:
        """Settings that it has chosen itself; a resumed run uses them again."""
        return {}

    def hints(self) -> list[str]:
        """What it chose, and what the user could change to make it faster."""
        return []

    def close(self) -> None:
        """Gives back what it holds."""
        self._undo.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _set_flags(undo: ExitStack, *, cuda: bool, tf32: bool, deterministic: bool) -> None:
    """Sets torch's global switches until `undo` is closed.

    One thread per process; on a GPU the precision of float32 products; and, with `deterministic`, fixed sums alone.
    """
    # Two threads in one process collapse when the other core is busy; and one gives the same sums everywhere.
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    if not cuda:
        return
    _set_precision(undo, tf32)
    _set(undo, torch.backends.cudnn, "benchmark", False)  # its choice may differ from lane to lane and run to run
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set(undo, torch.backends.cudnn, "deterministic", True)
        _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
        asked = torch.are_deterministic_algorithms_enabled()
        undo.callback(torch.use_deterministic_algorithms, asked)
        # A warning, no error: max-pooling is on torch's list, though windows that do not overlap are safe.
        torch.use_deterministic_algorithms(True, warn_only=True)


def _set_precision(undo: ExitStack, tf32: bool) -> None:
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):
        for where in (torch.backends.cuda.matmul, convolutions):
            _set(undo, where, "fp32_precision", "tf32" if tf32 else "ieee")
    else:  # before torch 2.9
        for where in (torch.backends.cuda.matmul, torch.backends.cudnn):
            _set(undo, where, "allow_tf32", tf32)


def _set(undo: ExitStack, where: Any, name: str, value: object) -> None:
    undo.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)


ENGINES: Registry[type[Engine]] = Registry(
    "engine.name", "a subclass of fedloom.engines.Engine", subclass_of(Engine), package="fedloom.engines",
    group="fedloom.engines",
)  # fmt: skip
