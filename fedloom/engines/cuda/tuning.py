"""Number of lanes, and of clients per lane: determined by shapes and free memory, never by timing."""

from dataclasses import dataclass

import torch

from fedloom.core.setup import Setup
from fedloom.engines.base import EngineSettings, even, per_round

LANES, LARGE_LANES, LARGE = 8, 4, 4_000_000
"""Number of lanes with one client each: for small networks, and for networks of at least LARGE parameters."""
COHORT = 50
"""Maximum number of clients per lane; more do not help on an H200 (docs/explanation/engines.md)."""
SMALL_STEP = 32 * 32 * 32
"""Pixels of a step (batch size · height · width) up to which one client leaves most of a GPU idle."""
MEMORY = 0.5
"""Share of the free memory that clients' parameters may take."""


@dataclass(frozen=True)
class Tuning:
    """Number of lanes, and of clients that each runs at a time."""

    lanes: int
    clients: int

    def __str__(self) -> str:
        return f"{self.lanes} lanes of {self.clients} clients" if self.clients > 1 else f"{self.lanes} lanes"


def tune(setup: Setup, settings: EngineSettings, parameters: int, free: int) -> Tuning:
    """Return the user's settings, or values that suit the network, the clients' sizes and the free memory.

    Args:
        setup: The task, the method and the training settings.
        settings: The recipe's `engine` section.
        parameters: Number of parameters of the network.
        free: Free memory of the GPU, in bytes.
    """
    clients = settings.cohort or (1 if settings.deterministic else _together(setup, parameters, free))
    if settings.workers:
        return Tuning(settings.workers, clients)
    if clients == 1:
        return Tuning(LARGE_LANES if parameters >= LARGE else LANES, 1)
    return Tuning(1 if per_round(setup) <= clients else 2, clients)


def _together(setup: Setup, parameters: int, free: int) -> int:
    """Return the number of clients to vectorise; 1 if one keeps the GPU busy, or if their sizes differ much."""
    pixels = setup.training.batch_size * setup.task.dataset.area
    if parameters >= LARGE or pixels > SMALL_STEP or not even(setup) or setup.method.pooled:
        return 1
    # parts, received parts, gradients, messages, and two moments of the optimizer
    fitting = int(MEMORY * free / max(1, 6 * 4 * parameters))
    return max(1, min(COHORT, per_round(setup), fitting))


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes."""
    return int(torch.cuda.mem_get_info(device)[0])


GAINS = {"tf32": 1.9, "bf16": 2.5}
"""Speed-up over float32, compiled, for work P (benchmarks/README.md)."""


def faster(settings: EngineSettings) -> list[str]:
    """Return a hint about the speed-up of lower precisions, which the user must choose."""
    if settings.precision != "float32" or settings.deterministic:
        return []
    gains = " and ".join(f"{name} up to {gain:g} times" for name, gain in GAINS.items())
    return [
        f"engine: lower precision with engine.compile=true is faster: engine.precision={gains} "
        "(docs/explanation/engines.md)"
    ]
