"""Number of lanes, and of clients per lane: determined by shapes and free memory, never by timing."""

from dataclasses import dataclass

import torch

from fedloom.core.errors import UserError
from fedloom.core.setup import Setup
from fedloom.engines.base import EngineSettings

LANES, LARGE_LANES, LARGE = 8, 4, 4_000_000
"""Number of lanes with one client each: for small networks, and for networks of at least LARGE parameters."""
COHORT = 50
"""Maximum number of clients per lane; more do not help on an H200 (docs/explanation/engines.md)."""
SMALL_STEP = 32 * 32 * 32
"""Pixels of a step (batch size · height · width) up to which one client leaves most of a GPU idle."""
EVEN = 0.5
"""Ratio of mean to largest client size from which all clients of a round begin and end their steps at about the same
time. Otherwise fewer are vectorised, and a client that has finished makes room for the next one."""
FEWEST = 5
"""Minimum number of clients of different sizes for which vectorisation pays off (docs/explanation/engines.md)."""
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

    Raises:
        UserError: `engine.cohort` and `engine.deterministic` contradict each other.
    """
    clients = settings.cohort or (1 if settings.deterministic else _together(setup, parameters, free))
    if settings.deterministic and clients > 1:
        raise UserError(
            f"engine.cohort = {clients}: with engine.deterministic a lane runs one client at a time; remove one setting"
        )
    if settings.workers:
        return Tuning(settings.workers, clients)
    if clients == 1:
        return Tuning(LARGE_LANES if parameters >= LARGE else LANES, 1)
    return Tuning(2 if _even(setup) and per_round(setup) > clients else 1, clients)


def per_round(setup: Setup) -> int:
    """Return the number of clients that take part in a round."""
    return max(1, round(setup.training.fraction * setup.task.clients))


def _sizes(setup: Setup) -> list[int]:
    return sorted(len(samples) for samples in setup.task.federation.train)


def _even(setup: Setup) -> bool:
    sizes = _sizes(setup)
    return sum(sizes) >= EVEN * len(sizes) * sizes[-1]


def _together(setup: Setup, parameters: int, free: int) -> int:
    """Return the number of clients to vectorise; 1 if one keeps the GPU busy, or waits for a much larger one."""
    pixels = setup.training.batch_size * setup.task.dataset.area
    if parameters >= LARGE or pixels > SMALL_STEP or setup.method.pooled:
        return 1
    # parts, received parts, gradients, messages, and two moments of the optimizer
    fitting = int(MEMORY * free / max(1, 6 * 4 * parameters))
    count = per_round(setup)
    if _even(setup):
        return max(1, min(COHORT, count, fitting))
    sizes = _sizes(setup)
    largest = sizes[min(len(sizes) - 1, len(sizes) * count // (count + 1))]  # of a typical round
    useful = min(COHORT, count, fitting, count * sum(sizes) // max(1, len(sizes) * largest))
    return useful if useful >= FEWEST else 1


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
