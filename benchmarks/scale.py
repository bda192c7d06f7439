"""Scaling of cost with the number of clients (it should not grow), the engine, the method and the model.

    python -m benchmarks.scale [clients engines bytes server] [--clients 1000 10000 100000] [--rounds 20]

clients: rounds of 50 out of 10³, 10⁴ or 10⁵ clients with about 40 images each by Dirichlet(0.1); one process per row.
engines: rounds/s of inline, processes and Ray on the same cores, taking turns.
bytes:   bytes that a client sends and receives per round for every method, compared with the formulas of FedCRL's paper
         (§V-B5).
server:  time and memory of averaging messages of a 100 MB model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.memory import resident

ROOT = Path(__file__).resolve().parents[1]
PER_ROUND, EACH, EVALUATED, BUDGET_MB = 50, 40, 200, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", nargs="+", help="for clients (default: fedavg, local) and bytes (default: all)")
    parser.add_argument("--engines", nargs="+", default=["inline", "processes", "ray"])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn2"], help="for engines")
    parser.add_argument("--turns", type=int, default=7, help="rounds per engine, of which the first is not counted")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the messages for server")
    parser.add_argument("--messages", type=int, nargs="+", default=[4, 16, 64], help="numbers of messages for server")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CLIENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.rounds)))
        return
    for part in options.parts:
        PARTS[part](options)
        print()


def clients(options: argparse.Namespace) -> None:
    print(f"{options.rounds} rounds of {PER_ROUND} clients, mlp, {BUDGET_MB} MB of RAM for clients' memory; MB")
    head = ("method", "clients", "seen", "data", "split s", "start s", "ms/round", "peak RSS", "above data")
    print("{:<8}{:>9}{:>7}{:>8}{:>8}{:>9}{:>10}{:>10}{:>12}".format(*head))
    for method in options.methods or ("fedavg", "local"):
        for number in options.clients:
            command = [sys.executable, "-m", "benchmarks.scale", "--rounds", str(options.rounds)]
            done = subprocess.run(
                [*command, "--one", method, str(number)], cwd=ROOT, stdout=subprocess.PIPE, check=True
            )
            row = json.loads(done.stdout)
            print(
                f"{method:<8}{number:>9}{row['seen']:>7}{row['data']:>8.1f}{row['deal']:>8.1f}{row['start']:>9.2f}"
                f"{row['round']:>10.1f}{row['peak']:>10.1f}{row['peak'] - row['before']:>12.1f}",
                flush=True,
            )
    print(
        "times are CPU times of the process: partitioning the data; from then to the end of round 1; a later round "
        "(median)"
    )
    print(f"data: images, labels and the clients' sample indices; at the end {EVALUATED} clients are evaluated")


def measure(method: str, clients: int, rounds: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from fedloom import Experiment, Recipe, Task, objectives
    from fedloom.data import Dataset, federate
    from fedloom.models import Factory

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    count = EACH * clients
    images = torch.from_numpy(rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, count))
    dataset = Dataset("synthetic", images, labels, torch.zeros(count, dtype=torch.bool), tuple("0123456789"))
    begun = process_time()
    federation = federate(dataset, clients=clients, partition="dirichlet:0.1", seed=0)
    deal = process_time() - begun
    ends: list[float] = []
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        recipe = Recipe.parse(
            {
                "method": method,
                "training": {"rounds": rounds, "fraction": min(1, PER_ROUND / clients)},
                "evaluation": {"every": rounds, "clients": EVALUATED},
                "storage": {"memory_mb": BUDGET_MB, "personal_models": False},
                "engine": {"name": "inline", "device": "cpu"},
                "out": str(Path(folder) / "run"),
            }
        )
        forget_the_peak()
        before = resident("VmRSS")
        begun = process_time()
        experiment = Experiment(
            recipe,
            task=Task(dataset, federation, Factory("mlp"), objectives.get("labels")),
            on_round=lambda _: ends.append(process_time()),
        )
        drawn = {client for round in range(1, rounds + 1) for client in experiment.sampling.draw(round)}
        experiment.run()
    laps = [end - start for start, end in pairwise(ends)]
    positions = sum(part.nbytes for part in (*federation.train, *federation.test))
    return {
        "before": before,
        "peak": resident("VmHWM"),
        "data": (images.nbytes + labels.nbytes + positions) / 1e6,
        "seen": len(drawn),
        "deal": deal,
        "start": ends[0] - begun,
        "round": 1000 * statistics.median(laps[:-1] or laps or [ends[0] - begun]),  # the last round evaluates
    }


def forget_the_peak() -> None:
    """Reset the peak memory of this process (Linux), so that partitioning the data does not count."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def engines(options: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from fedloom import Task, objectives
    from fedloom.core.job import Job
    from fedloom.core.message import Message
    from fedloom.core.setup import Setup
    from fedloom.core.training import Training
    from fedloom.data import Dataset, Federation
    from fedloom.engines import EngineSettings, make_engine
    from fedloom.engines.processes import cores
    from fedloom.methods import get
    from fedloom.models import Factory

    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (4000, 1, 28, 28), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, 4000))
    dataset = Dataset("synthetic", images, labels, torch.zeros(4000, dtype=torch.bool), tuple("0123456789"))
    print(f"rounds of {PER_ROUND} clients of 64 images, {cores()} workers; rounds/s (relative to processes)")
    names = options.engines  # the order matters: worker processes must be forked before Ray starts threads
    print(f"{'model':<8}{'message MB':>14}" + "".join(f"{name:>16}" for name in names))
    for model in options.models:
        held = [np.arange(i * 64, i * 64 + 64) for i in range(PER_ROUND)]
        task = Task(dataset, Federation(held, held), Factory(model), objectives.get("labels"))
        setup = Setup(task, get("fedavg"), Training(batch_size=16), 0)
        made = {name: make_engine(setup, EngineSettings(name=name, device="cpu")) for name in names}
        message = Message(made[names[0]].server_workspace.initial)
        jobs = [Job("update", 1, message, client=client) for client in range(PER_ROUND)]
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.turns):
            for name, engine in made.items():
                begun = perf_counter()
                assert all(result.error is None for result in engine.run(jobs))
                taken[name].append(perf_counter() - begun)
        for engine in made.values():
            engine.close()
        rate = {name: 1 / statistics.median(times[1:] or times) for name, times in taken.items()}
        base = rate.get("processes", rate[names[0]])
        cells = "".join(f"{rate[name]:>9.2f} ({rate[name] / base:.2f})" for name in names)
        print(f"{model:<8}{message.nbytes / 1e6:>14.2f}{cells}", flush=True)


def bytes_of_methods(options: argparse.Namespace) -> None:
    from fedloom import Recipe
    from fedloom.core.flat_state import nbytes
    from fedloom.core.state import under
    from fedloom.core.workspace import Workspace
    from fedloom.experiment.loop import Experiment
    from fedloom.methods import METHODS as REGISTRY

    print("bytes of a client per round (digits, 10 classes, mlp); θ = ϕ + π; Ω̄: a mean representation per class")
    print("{:<13}{:>9}{:>9}  {:<26}{:>9}{:>9}".format("method", "up", "down", "formula", "bytes", "extra"))
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        for name in sorted(options.methods or REGISTRY):
            recipe = Recipe.parse(
                {
                    "method": name, "data": {"name": "digits", "clients": 4, "partition": "iid", "limit": 200},
                    "training": {"rounds": 1}, "engine": "inline", "out": str(Path(folder) / name),
                }
            )  # fmt: skip
            experiment = Experiment(recipe)
            experiment.run()
            record = experiment.history[0]
            parts = Workspace(experiment.setup).tensors
            theta = {n: t for n, t in parts.items() if under(n, ("model.extractor", "model.head"))}
            size = {
                "θ": nbytes(theta),
                "ϕ": nbytes({n: t for n, t in theta.items() if under(n, ("model.extractor",))}),
                "π": nbytes({n: t for n, t in theta.items() if under(n, ("model.head",))}),
                "Ω̄": 4 * experiment.task.classes * experiment.task.features,
                "q": nbytes({n: t for n, t in parts.items() if under(n, EXTRA)}),
            }
            formula, times = FORMULAS.get(name, ("2 φ(θ)", {"θ": 2}))
            expected = sum(count * size[letter] for letter, count in times.items())
            up, down = int(record["up_bytes"]), int(record["down_bytes"])
            print(f"{name:<13}{up:>9}{down:>9}  {formula:<26}{expected:>9}{up + down - expected:>9}")


EXTRA = ("model.projections", "model.projection", "policy", "valve")
FORMULAS: dict[str, tuple[str, dict[str, int]]] = {
    "local": ("0", {}),
    "centralized": ("0", {}),
    "untrained": ("0", {}),
    "fedper": ("2 φ(ϕ)", {"ϕ": 2}),
    "fedrep": ("2 φ(ϕ)", {"ϕ": 2}),
    "fedbabu": ("2 φ(ϕ)", {"ϕ": 2}),
    "repper": ("2 φ(ϕ)", {"ϕ": 2}),
    "fedas": ("2 φ(ϕ)", {"ϕ": 2}),
    "lgfedavg": ("2 φ(π)", {"π": 2}),
    "fedproto": ("2 φ(Ω̄)", {"Ω̄": 2}),
    "fedtgp": ("2 φ(Ω̄)", {"Ω̄": 2}),
    "fedgh": ("φ(Ω̄) + φ(π)", {"Ω̄": 1, "π": 1}),
    "fedcrl": ("2 [φ(ϕ) + φ(Ω̄)]", {"ϕ": 2, "Ω̄": 2}),
    "gpfl": ("2 [φ(ϕ) + φ(valve) + φ(Ω̄)]", {"ϕ": 2, "q": 2, "Ω̄": 2}),
    "fedcp": ("2 [φ(θ) + φ(policy)]", {"θ": 2, "q": 2}),
    "fedpac": ("2 φ(θ) + 3 φ(Ω̄)", {"θ": 2, "Ω̄": 3}),
    "scaffold": ("4 φ(θ)", {"θ": 4}),
    "moon": ("2 [φ(θ) + φ(projection)]", {"θ": 2, "q": 2}),
    "fedintr": ("2 [φ(θ) + φ(projections)]", {"θ": 2, "q": 2}),
}
"""Bytes per client and round, up and down. The formulas of FedAvg, FedProto, FedGH and FedCRL are from the paper."""


def server(options: argparse.Namespace) -> None:
    import torch

    from fedloom import Task, objectives
    from fedloom.core.message import Message
    from fedloom.core.server import Server
    from fedloom.core.setup import Setup
    from fedloom.core.training import Training
    from fedloom.core.workspace import Workspace
    from fedloom.data import federate, load
    from fedloom.methods import get
    from fedloom.models import Factory

    torch.set_num_threads(1)
    digits = load("digits")
    task = Task(digits, federate(digits, clients=4, partition="iid", seed=0), Factory("mlp"), objectives.get("labels"))
    home = Server(Workspace(Setup(task, get("fedavg"), Training(), 0)), federation=4)
    source = {f"layer.{i}": torch.rand(options.megabytes * 25_000) for i in range(10)}
    size = options.megabytes * 1_000_000
    print(f"averaging messages of {options.megabytes} MB, created one by one; one core")
    print("{:>9}{:>15}{:>9}{:>14}".format("messages", "CPU s/message", "GB/s", "extra, MB"))
    before = resident("VmRSS")
    for count in options.messages:
        forget_the_peak()
        begun = process_time()
        home.average(Message({n: t.clone() for n, t in source.items()}, samples=3) for _ in range(count))
        each = (process_time() - begun) / count
        print(f"{count:>9}{each:>15.3f}{size / 1e9 / each:>9.2f}{resident('VmHWM') - before:>14.0f}", flush=True)
    print(
        "extra: peak RSS minus RSS before the first message; "
        f"it includes {options.megabytes} MB for a message and the same for the mean"
    )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "clients": clients, "engines": engines, "bytes": bytes_of_methods, "server": server,
}  # fmt: skip

if __name__ == "__main__":
    main()
