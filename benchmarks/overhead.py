"""What an engine adds to a small client's job: 1,000 clients of 10 images, a round of each engine in turn.

    python -m benchmarks.overhead [--methods fedavg fedper] [--workers 1 2] [--clients 1000] [--turns 6]

The overhead is the time per job less inline's time per job divided by the number of workers. Times are the least of
all turns, as other processes only ever add to them.
"""

import argparse
from time import perf_counter

import numpy as np
import torch

from fedloom import Task, objectives
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.optimizers import Training
from fedloom.core.workspace import Setup
from fedloom.data import Dataset, Federation
from fedloom.engines import Engine, EngineSettings, make_engine
from fedloom.methods import get
from fedloom.models import Factory

SAMPLES = 10
Memories = dict[int, dict[str, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedper"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=6, help="the first does not count")
    options = parser.parse_args()
    print(f"{options.clients} clients of {SAMPLES} images, mlp; microseconds per job")
    print(f"{'method':<10}{'engine':<16}{'time':>8}{'overhead':>10}")
    for method in options.methods:
        setup = federation(method, options.clients)
        asked = [("inline", 1), *(("processes", workers) for workers in options.workers)]
        engines = [make_engine(setup, EngineSettings(name=n, workers=w, device="cpu")) for n, w in asked]
        memories: list[Memories] = [{} for _ in engines]
        turns = [
            [timed_round(engine, kept, options.clients) for engine, kept in zip(engines, memories, strict=True)]
            for _ in range(options.turns)
        ]
        for engine in engines:
            engine.close()
        least = [min(times) for times in zip(*(turns[1:] or turns), strict=True)]
        for (name, workers), time in zip(asked, least, strict=True):
            print(f"{method:<10}{name + f', {workers}':<16}{time:>8.0f}{time - least[0] / workers:>10.0f}", flush=True)


def federation(method: str, clients: int) -> Setup:
    rng = np.random.default_rng(0)
    count = clients * SAMPLES
    images = torch.from_numpy(rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, count))
    dataset = Dataset("synthetic", images, labels, torch.zeros(count, dtype=torch.bool), tuple("0123456789"))
    held = [np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(clients)]
    task = Task(dataset, Federation(held, held), Factory("mlp"), objectives.get("labels"))
    return Setup(task, get(method), Training(epochs=1), 0)


def timed_round(engine: Engine, memories: Memories, clients: int) -> float:
    """Microseconds per job of a round; clients keep their memories."""
    message = Message(engine.server_workspace.initial)
    begun = perf_counter()
    for result in engine.run(Job("update", 1, message, client=c, memory=memories.get(c)) for c in range(clients)):
        assert result.memory is not None, result.error
        memories[result.client] = result.memory
    return (perf_counter() - begun) / clients * 1e6


if __name__ == "__main__":
    main()
