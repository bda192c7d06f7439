"""GPU memory with 100 and 1,000 clients of a ResNet-18, 20 clients per round."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contest.ours import engine
from benchmarks.contest.works import TESTED, Clock, synthetic
from fedloom import Experiment, Recipe, Task, objectives
from fedloom.data import Federation
from fedloom.models import Factory

PER_ROUND, ROUNDS, EACH, POOL, MEMORY_MB = 20, 3, 128, 20_000, 512


def run(method: str, clients: int, name: str, device: str, lanes: int | None, scale: float) -> dict[str, Any]:
    """Measure time and memory with a number of clients.

    `local` keeps a ResNet-18 (45 MB) for every client that has taken part; what exceeds `memory_mb` spills to disk. All
    clients have the same number of images from one pool, so the work of a round does not depend on the number of
    clients.
    """
    each, clients = max(4, round(EACH * scale)), max(PER_ROUND, clients)
    dataset = synthetic(max(each + TESTED, round(POOL * scale)))
    rng = np.random.default_rng(0)
    held = [np.sort(rng.choice(len(dataset.inputs), each + TESTED, replace=False)) for _ in range(clients)]
    federation = Federation([h[:each] for h in held], [h[each:] for h in held])
    seconds: list[float] = []
    clock = Clock(device)
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        recipe = Recipe.parse(
            {
                "method": method,
                "model": "resnet18",
                "training": {"rounds": ROUNDS, "fraction": PER_ROUND / clients, "batch_size": min(64, each)},
                "evaluation": {"every": 10**6, "clients": 1},
                "storage": {"memory_mb": MEMORY_MB, "personal_models": False},
                "engine": engine(name, device, lanes),
                "out": str(Path(folder) / "run"),
            }
        )
        experiment = Experiment(
            recipe,
            task=Task(dataset, federation, Factory("resnet18"), objectives.get("labels")),
            on_round=lambda record: seconds.append(record["train_seconds"]),
        )
        experiment.run()
    return {
        "clients": clients,
        "seen": len({client for round in range(1, ROUNDS + 1) for client in experiment.sampling.draw(round)}),
        "seconds": seconds,
        "memory": clock.memory(),
        "allocated": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "resident": peak_resident(),
    }


def peak_resident() -> float | None:
    """Return the peak memory of this process in gigabytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9
