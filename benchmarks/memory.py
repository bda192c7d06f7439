"""Memory and time of a round with 100, 1,000 and 10,000 clients: neither may grow with the number of clients.

    python benchmarks/memory.py [--clients 100 1000 10000] [--rounds 40]

A round has 20 clients, each with 32 samples from the same pool of images. `local` keeps a whole model (0.44 MB) for
every client that took part, of which 16 MB may be in RAM; the rest is stored on disk. Each row is measured in a
separate process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMAGES, SAMPLES, TESTED, PER_ROUND, BUDGET_MB = 40_000, 32, 8, 20, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--methods", nargs="+", default=["local", "fedavg"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--budget", type=int, default=BUDGET_MB, help="storage.memory_mb")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CLIENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.rounds, options.budget)))
        return
    print(f"{options.rounds} rounds of {PER_ROUND} clients, {options.budget} MB for clients' memory; MB")
    head = ("method", "clients", "seen", "kept of them", "data", "peak RSS", "above data", "ms/round")
    print("{:<10}{:>8}{:>7}{:>14}{:>7}{:>10}{:>12}{:>10}".format(*head))
    for method in options.methods:
        for clients in options.clients:
            command = [sys.executable, __file__, "--rounds", str(options.rounds), "--budget", str(options.budget)]
            done = subprocess.run(
                [*command, "--one", method, str(clients)], stdout=subprocess.PIPE, check=True, text=True
            )
            row = json.loads(done.stdout)
            print(
                f"{method:<10}{clients:>8}{row['seen']:>7}{row['kept']:>14.1f}{row['data']:>7.1f}"
                f"{row['peak']:>10.1f}{row['peak'] - row['before']:>12.1f}{1000 * row['seconds']:>10.1f}"
            )
    print("data: images, labels and the clients' sample indices; above data: peak minus RSS with torch and data loaded")


def measure(method: str, clients: int, rounds: int, budget: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from fedloom import Experiment, Recipe, Task, objectives
    from fedloom.data import Dataset, Federation
    from fedloom.models import Factory

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (IMAGES, 1, 28, 28), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, IMAGES))
    dataset = Dataset("synthetic", images, labels, torch.zeros(IMAGES, dtype=torch.bool), tuple("0123456789"))
    held = [np.sort(rng.choice(IMAGES, SAMPLES + TESTED, replace=False)) for _ in range(clients)]
    federation = Federation([positions[:SAMPLES] for positions in held], [positions[SAMPLES:] for positions in held])
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        recipe = Recipe.parse(
            {
                "method": method,
                "training": {"rounds": rounds, "fraction": min(1, PER_ROUND / clients)},
                "evaluation": {"every": rounds, "clients": 20},
                "storage": {"memory_mb": budget, "personal_models": False},
                "engine": {"name": "inline", "device": "cpu"},
                "out": str(Path(folder) / "run"),
            }
        )
        before = resident("VmRSS")
        experiment = Experiment(
            recipe,
            task=Task(dataset, federation, Factory("mlp"), objectives.get("labels")),
            on_round=lambda record: seconds.append(record["train_seconds"]),
        )
        drawn = {client for round in range(1, rounds + 1) for client in experiment.sampling.draw(round)}
        experiment.run()
    model = 4 * ((784 + 1) * 128 + (128 + 1) * 64 + (64 + 1) * 10) / 1e6
    return {
        "before": before,
        "peak": resident("VmHWM"),
        "data": (images.nbytes + labels.nbytes + sum(positions.nbytes for positions in held)) / 1e6,
        "seen": len(drawn),
        "kept": len(drawn) * model if method == "local" else 0.0,
        "seconds": statistics.median(seconds),
    }


def resident(which: str) -> float:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(which))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # in bytes on systems without /proc (macOS)


if __name__ == "__main__":
    main()
