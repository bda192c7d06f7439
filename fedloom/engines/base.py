"""The base class of engines, which map jobs to results, and the recipe's `engine` section.

Engines own devices and processes. They do not depend on particular methods.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from torch import nn

from fedloom.core.checking import Section
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.optimizers import TORCH_OPTIMIZERS
from fedloom.core.registry import Registry, subclass_of
from fedloom.core.setup import Precision, Setup
from fedloom.core.workspace import Workspace

CHANNELS_LAST = (
    "engine: engine.channels_last=true may compute convolutions faster on a CPU (0.9 to 1.2 times as fast, by network "
    "and batch size), but changes the last digits"
)
"""Hint for networks such as those of `python -m benchmarks.layout`, none of which keeps all bits: the user decides."""

SMALL_NETWORK, SMALL_BATCH, MANY_STEPS, MANY_CLIENTS = 50_000, 32, 100_000, 10
"""Parameters and batch size up to which, and training steps and clients per round from which, vectorised clients save
more than 10 seconds on a CPU (`python -m benchmarks.overhead`). Two or three clients take longer than one by one."""
COHORT = (
    "engine: engine.cohort=50 trains 50 clients per step, 2 to 4 times as fast for such a small network, but changes "
    "the last digits"
)
EVEN = 0.5
"""Minimum ratio of mean to largest client size for which clients are vectorised by default. The user can vectorise less
even ones (`engine.cohort`); that has not been measured on a GPU."""


def _head(address: str | None) -> str | None:
    if address is None or address == "auto" or re.fullmatch(r"[^\s/]+:\d+", address):
        return address
    raise ValueError(f"'{address}' is not an address; write host:port as printed by `ray start --head`, or auto")


class EngineSettings(Section):
    """Where clients run and how fast. These settings do not change what is computed."""

    name: str = Field(
        "auto",
        description="auto (lanes on a GPU if all clients have the same network, else inline), inline, processes, "
        "lanes, ray, or replay (a check for lanes)",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="number of worker processes (default: one per core), Ray workers (default: as many as fit into "
        "the cluster) or lanes (default: 8, 4 for large networks, 1 or 2 if steps are vectorised over clients)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses a GPU if the engine supports it")
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="precision of matrix products on a GPU: tf32 rounds their inputs to 10 bits; bf16 is autocast",
    )
    channels_last: bool = Field(False, description="store images and convolutions with channels last in memory")
    deterministic: bool = Field(False, description="make reruns bit-identical on a GPU too (on CPUs they always are)")
    compile: bool = Field(False, description="lanes: compile training steps; pays off in long runs")
    cohort: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="number of clients vectorised per training step (default: 1; with lanes it depends on the clients' "
        "sizes, the network's size and the free memory)",
    )
    client_timeout: float | None = Field(
        None,
        gt=0,
        description="processes, ray: seconds after which a client is left out of the round and its worker replaced; "
        "other engines cannot stop a client and reject this setting",
    )
    address: Annotated[str | None, AfterValidator(_head)] = Field(
        None, description="ray: host:port of a cluster's head, or auto (default: start Ray on this machine for the run)"
    )
    worker_cpus: float = Field(1, gt=0, description="ray: CPUs per worker")
    worker_gpus: float = Field(0, ge=0, description="ray: GPUs per worker; above 0 it runs lanes")
    lost_after: float = Field(
        60, gt=0, description="ray: seconds without a heartbeat after which a worker's jobs are given to another worker"
    )

    @property
    def clients_per_step(self) -> int:
        """Number of clients that the user wants to be vectorised per training step: `cohort`, by default 1."""
        return self.cohort or 1


class Engine(ABC):
    """Base class of engines, used as a context manager.

    A subclass with a `name` is registered under it. It must implement `run`.

    Args:
        setup: The task, the method and the training settings.
        settings: The recipe's `engine` section.

    Raises:
        UserError: The device or the precision is not available.

    Example:
        >>> class Reversed(Engine):
        ...     name = "reversed"
        ...
        ...     def run(self, jobs):
        ...         results = [handle(self.server_workspace, job) for job in reversed(list(jobs))]
        ...         yield from reversed(results)
    """

    name: ClassVar[str]
    """Name in recipes."""
    gpu: ClassVar[bool] = False
    """Whether the engine can use a GPU."""
    mixes_networks: ClassVar[bool] = True
    """Whether clients may have different networks: not if all run in the same recorded or vectorised steps."""
    vectorises: ClassVar[bool] = False
    """Whether the engine can vectorise training steps over clients (`engine.cohort`)."""
    can_stop_clients: ClassVar[bool] = False
    """Whether a client that takes too long can be stopped: possible for processes, not for threads."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            ENGINES.add(cls.name, cls)

    def __init__(self, setup: Setup, settings: EngineSettings):
        self.setup = setup
        self.settings = settings
        if len(setup.variants) > 1 and not self.mixes_networks:
            raise UserError(
                f"engine.name = '{self.name}': replays one recorded step for all clients, but they have different "
                "networks; use engine.name = 'inline' (with a GPU: engine.device = 'cuda'), or 'processes'"
            )
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
        """The server's workspace."""

    def _device(self) -> torch.device:
        wanted = self.settings.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device = 'cuda': torch sees no CUDA device; use engine.device = 'cpu'")
        cuda = wanted == "cuda" or (wanted == "auto" and self.gpu and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")

    def _precision(self) -> Precision:
        precision = self.settings.precision
        if precision != "float32" and self.device.type == "cpu":
            raise UserError(f"engine.precision = '{precision}': needs a GPU, but this runs on a CPU; use float32")
        return Precision(bf16=precision == "bf16", channels_last=self.settings.channels_last)

    @abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Run jobs and yield their results in the order of the jobs. Failures are results, too.

        Args:
            jobs: The jobs, preferably the longest first. They are consumed lazily.
        """

    def choice(self) -> dict[str, int]:
        """Return the settings that the engine has chosen automatically; a resumed run uses them again."""
        return {}

    def hints(self) -> list[str]:
        """Return lines for the user: the chosen settings, and settings that would be faster."""
        return []

    def close(self) -> None:
        """Release devices and processes, and restore torch's global settings."""
        self._undo.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def per_round(setup: Setup) -> int:
    """Return the number of clients that take part in a round."""
    return max(1, round(setup.training.fraction * setup.task.clients))


def channels_last_hint(engine: Engine) -> list[str]:
    """Return the hint that another memory layout may be faster, if the engine computes convolutions on a CPU."""
    if engine.device.type != "cpu" or engine.precision.channels_last:
        return []
    convolves = any(isinstance(module, nn.Conv2d) for module in engine.server_workspace.parts.modules())
    return [CHANNELS_LAST] if convolves else []


def even(setup: Setup) -> bool:
    """Return whether clients have similar numbers of samples, so that all of them end their steps at about one time."""
    sizes = [len(samples) for samples in setup.task.federation.train]
    return sum(sizes) >= EVEN * len(sizes) * max(sizes)


def why_one_by_one(setup: Setup) -> str | None:
    """Return why the steps of several clients cannot be vectorised, with a remedy; None if they can."""
    if len(setup.variants) > 1:
        return "clients have different networks, so their steps cannot be vectorised; remove engine.cohort"
    if setup.training.optimizer.name in TORCH_OPTIMIZERS:
        return (
            "steps of a torch.optim optimizer cannot be vectorised, because it keeps its step count and state in "
            "Python; remove engine.cohort, or use a built-in optimizer or an object with direction()"
        )
    return None


def cohort_hint(engine: Engine, clients: int) -> list[str]:
    """Return the hint to vectorise clients, if the network and the clients' batches are small and the run is long.

    Args:
        engine: The engine.
        clients: Number of clients in a round that one process trains.
    """
    setup, training = engine.setup, engine.setup.training
    network = engine.server_workspace.parts
    parameters = sum(parameter.numel() for parameter in network.parameters())
    samples = training.rounds * training.epochs * training.fraction * sum(map(len, setup.task.federation.train))
    if (
        engine.settings.cohort is not None
        or engine.settings.deterministic
        or engine.settings.client_timeout is not None
        or engine.device.type != "cpu"
        or why_one_by_one(setup) is not None
        or setup.method.pooled
        or clients < MANY_CLIENTS
        or not even(setup)
        or parameters > SMALL_NETWORK
        or training.batch_size > SMALL_BATCH
        or samples < MANY_STEPS * training.batch_size
        or any(isinstance(module, nn.modules.conv._ConvNd) for module in network.modules())
    ):
        return []
    return [COHORT]


def _set_flags(undo: ExitStack, *, cuda: bool, tf32: bool, deterministic: bool) -> None:
    """Set torch's global flags until `undo` is closed.

    One thread per process; on a GPU the precision of float32 products; with `deterministic`, deterministic algorithms.
    """
    # Two threads per process are very slow if another process uses the core; one thread also fixes the order of sums.
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    if not cuda:
        return
    _set_precision(undo, tf32)
    _set(undo, torch.backends.cudnn, "benchmark", False)  # its choices may differ between lanes and runs
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set(undo, torch.backends.cudnn, "deterministic", True)
        _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
        before = torch.are_deterministic_algorithms_enabled()
        undo.callback(torch.use_deterministic_algorithms, before)
        # Warn only: torch lists max-pooling as nondeterministic, although it is not if windows do not overlap.
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
