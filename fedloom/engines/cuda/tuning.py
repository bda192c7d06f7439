"""How many lanes a GPU gets and how many clients each takes at a time: a rule of shapes and memory, never of times."""

from dataclasses import dataclass

import torch

from fedloom.core.errors import UserError
from fedloom.core.workspace import Setup
from fedloom.engines.base import EngineSettings

LANES, LARGE_LANES, LARGE = 8, 4, 4_000_000
"""Lanes of one client: a GPU is filled by many small networks, or by few of LARGE parameters."""
COHORT = 50
"""Clients at a time, at most: more gain nothing on an H200 (docs/explanation/engines.md)."""
SMALL_STEP = 32 * 32 * 32
"""Pixels of a step (batch size times height times width) up to which one client leaves most of a GPU idle."""
EVEN = 0.5
"""Mean client size over the largest, from which on clients gain by taking their steps together."""
MEMORY = 0.5
"""Share of the free memory that clients' parameters may take."""


@dataclass(frozen=True)
class Tuning:
    """Lanes, and clients that each takes at a time."""

    lanes: int
    clients: int

    def __str__(self) -> str:
        return f"{self.lanes} lanes of {self.clients} clients" if self.clients > 1 else f"{self.lanes} lanes"


def tune(setup: Setup, settings: EngineSettings, parameters: int, free: int) -> Tuning:
    """The user's numbers, or ones that suit the network, the clients' sizes and the free memory (bytes)."""
    clients = settings.cohort or (1 if settings.deterministic else _together(setup, parameters, free))
    if settings.deterministic and clients > 1:
        raise UserError(
            f"engine.cohort = {clients}: with engine.deterministic a lane takes one client at a time; remove one"
        )
    if settings.workers:
        return Tuning(settings.workers, clients)
    if clients == 1:
        return Tuning(LARGE_LANES if parameters >= LARGE else LANES, 1)
    return Tuning(1 if per_round(setup) <= clients else 2, clients)


def per_round(setup: Setup) -> int:
    """Clients that take part in a round."""
    return max(1, round(setup.training.fraction * setup.task.clients))


def _together(setup: Setup, parameters: int, free: int) -> int:
    """Clients that take their steps together; 1 where a single one keeps the GPU busy, or their sizes differ much."""
    task, training = setup.task, setup.training
    sizes = [len(samples) for samples in task.federation.train]
    pixels = training.batch_size * task.dataset.images[0, 0].numel()
    even = sum(sizes) >= EVEN * len(sizes) * max(sizes)
    if parameters >= LARGE or pixels > SMALL_STEP or not even or setup.method.pooled:
        return 1
    # parts, received parts, gradients, what is sent, and two moments of the optimizer
    fitting = int(MEMORY * free / max(1, 6 * 4 * parameters))
    return max(1, min(COHORT, per_round(setup), fitting))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


GAINS = {"tf32": 1.9, "bf16": 2.5}
"""Times as fast as float32, compiled, on work P (benchmarks/README.md)."""


def faster(settings: EngineSettings) -> list[str]:
    """What a lower precision, which is the user's decision, would gain."""
    if settings.precision != "float32" or settings.deterministic:
        return []
    gains = " and ".join(f"{name} up to {gain:g} times" for name, gain in GAINS.items())
    return [f"engine: less precise products, compiled, are faster: engine.precision={gains} (docs/explanation/engines.md)"]
