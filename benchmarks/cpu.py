"""FedAvg on CPU cores: fedloom's engines compared with a plain PyTorch loop on the same workload.

    python benchmarks/cpu.py [--images 4000] [--rounds 5] [--busy]

Each contestant runs in a separate process (fedloom's engines set torch's number of threads). The contestants take turns
round by round, so that all of them see the same load of the machine. Evaluation is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

BATCH, LR, CLASSES, DROPOUT = 16, 0.01, 10, 0.3
CONTESTANTS = {
    "plain loop": "PyTorch with its default number of threads",
    "plain loop, 1 thread": "the same, torch.set_num_threads(1)",
    "inline": "fedloom, one process",
    "processes": "fedloom, one single-threaded worker per core",
    "processes, channels last": "the same with engine.channels_last",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--images", type=int, default=4000, help="three quarters of them are used for training in a round"
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--workers", type=int, default=2, help="workers of the engine `processes`")
    parser.add_argument("--busy", action="store_true", help="keep one core busy with another process")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="CONTESTANT")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        take_part(options)
    else:
        contest(options)


def contest(options: argparse.Namespace) -> None:
    """Let the contestants take turns round by round, and print the table."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if options.busy else None
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    running: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        try:
            for name in options.only:
                command = [sys.executable, __file__, *sys.argv[1:], "--contestant", name, "--out", f"{folder}/{name}"]
                running[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
                answer(running[name])  # wait until it is ready
            for round in range(1 + options.rounds):
                for name, process in running.items():
                    measured[name].append(ask(process))
                print(
                    f"round {round}: " + ", ".join(f"{measured[n][-1]['seconds']:.2f}" for n in measured),
                    file=sys.stderr,
                )
            same = final_weights(Path(folder), running) if {"inline", "processes"} <= running.keys() else None
        finally:
            for process in [*running.values(), *([busy] if busy else [])]:
                process.kill()
                process.wait()
    table(measured, options)
    if same is not None:
        print(f"final weights of inline and processes: {'bit-identical' if same else 'DIFFERENT'}")


def ask(process: "subprocess.Popen[str]") -> dict[str, Any]:
    nod(process)
    return answer(process)


def nod(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a contestant ended early, with exit code {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def final_weights(folder: Path, running: dict[str, "subprocess.Popen[str]"]) -> bool:
    for name in ("inline", "processes"):
        nod(running[name])
        running[name].wait(120)
    one, other = ((folder / name / "models" / "server.safetensors").read_bytes() for name in ("inline", "processes"))
    return one == other


def table(measured: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    counted = {name: rounds[1:] for name, rounds in measured.items()}
    seconds = {name: statistics.median(r["seconds"] for r in rounds) for name, rounds in counted.items()}
    print(
        f"FedAvg, {options.clients} clients sized by Dir(0.1), CNN2 on 28×28×1, batch {BATCH}, "
        f"{measured[options.only[0]][0]['images']} images per round; median of {options.rounds} rounds, "
        "contestants take turns" + ("; another process keeps a core busy" if options.busy else "")
    )
    head = ("", "s/round", "client steps/s", "img/s", "× plain", "fastest–slowest", "threads", "loss")
    print("{:<26}{:>9}{:>16}{:>8}{:>9}{:>17}{:>9}{:>7}".format(*head))
    plain = seconds.get("plain loop")
    for name, rounds in counted.items():
        ratio = "–" if plain is None else f"{plain / seconds[name]:.2f}"
        each = [r["seconds"] for r in rounds]
        print(
            f"{name:<26}{seconds[name]:>9.2f}{rounds[0]['steps'] / seconds[name]:>16.0f}"
            f"{rounds[0]['images'] / seconds[name]:>8.0f}{ratio:>9}"
            f"{f'{min(each):.2f}–{max(each):.2f}':>17}{rounds[0]['threads']:>9}{rounds[-1]['loss']:>7.3f}"
        )


def take_part(options: argparse.Namespace) -> None:
    """Run one contestant: for each line of input, run a round and print a line with its result."""
    import torch

    from fedloom.data import Dataset, federate

    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, options.images)
    patterns = rng.integers(0, 256, (CLASSES, 1, 28, 28))
    images = np.clip(patterns[labels] * 0.3 + rng.normal(90, 60, (options.images, 1, 28, 28)), 0, 255).astype(np.uint8)
    dataset = Dataset(
        name="synthetic",
        inputs=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        test=torch.zeros(options.images, dtype=torch.bool),
        classes=tuple(map(str, range(CLASSES))),
    )
    federation = federate(dataset, clients=options.clients, partition="dirichlet:0.1", seed=0)
    sizes = [len(samples) for samples in federation.train]
    plain = options.contestant.startswith("plain")
    facts = {"images": sum(sizes), "steps": sum(steps(size, joined=not plain) for size in sizes)}

    def tell(**values: Any) -> None:
        print(json.dumps(facts | {"threads": torch.get_num_threads()} | values), flush=True)

    tell()
    if plain:
        if options.contestant.endswith("1 thread"):
            torch.set_num_threads(1)
        plain_loop(dataset, federation, 1 + options.rounds, tell)
    else:
        fedloom_run(dataset, federation, options, tell)


def steps(size: int, *, joined: bool) -> int:
    """Return the number of batches per epoch; fedloom adds a remainder of one sample to the last batch."""
    return max(1, -(-size // BATCH) - (joined and size % BATCH == 1))


def fedloom_run(dataset: Any, federation: Any, options: argparse.Namespace, tell: Callable[..., None]) -> None:
    from fedloom import Experiment, Recipe, Task, objectives
    from fedloom.models import Factory

    recipe = Recipe.parse(
        {
            "method": "fedavg",
            "model": {"name": "cnn2", "dropout": DROPOUT},
            "training": {"rounds": 1 + options.rounds, "batch_size": BATCH, "optimizer": {"lr": LR}},
            "evaluation": {"every": 10**6, "clients": 1},
            "engine": {
                "name": options.contestant.split(",")[0],
                "channels_last": options.contestant.endswith("channels last"),
                "device": "cpu",
                "workers": options.workers if options.contestant.startswith("processes") else None,
            },
            "out": str(options.out),
        }
    )

    def on_round(record: dict[str, Any]) -> None:
        tell(seconds=record["train_seconds"], loss=record["loss"])
        input()

    input()
    Experiment(
        recipe,
        task=Task(dataset, federation, Factory("cnn2", {"dropout": DROPOUT}), objectives.get("labels")),
        on_round=on_round,
    ).run()


def plain_loop(dataset: Any, federation: Any, rounds: int, tell: Callable[..., None]) -> None:
    """Run FedAvg as common libraries implement it.

    Each client has a DataLoader over single samples (stored as normalised floats, so nothing is decoded), a model and
    torch.optim.SGD. State dicts are averaged by sample counts.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from torch.utils.data import Dataset as Samples

    class ClientData(Samples):  # type: ignore[type-arg]
        def __init__(self, positions: np.ndarray):
            self.images = (dataset.inputs[positions].float() / 255 - 0.5) / 0.5
            self.labels = dataset.labels[positions]

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.images[i], self.labels[i]

    torch.manual_seed(0)
    server = nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip
    data = [ClientData(positions) for positions in federation.train]
    models = [deepcopy(server) for _ in data]
    objective = nn.CrossEntropyLoss()

    for _ in range(rounds):
        input()
        start = perf_counter()
        total = 0.0
        for model, samples in zip(models, data, strict=True):
            model.load_state_dict(server.state_dict())
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in DataLoader(samples, batch_size=BATCH, shuffle=True):
                loss = objective(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(y)
        weights = [len(samples) / sum(map(len, data)) for samples in data]
        states = [model.state_dict() for model in models]
        average = OrderedDict(
            (name, sum(weight * state[name] for weight, state in zip(weights, states, strict=True)))
            for name in states[0]
        )
        server.load_state_dict(average)
        tell(seconds=perf_counter() - start, loss=total / sum(map(len, data)))
    input()  # do not tear down while other contestants are measured


if __name__ == "__main__":
    main()
