"""Overhead of fedloom's engines per client on a CPU, measured with many tiny clients.

    python -m benchmarks.overhead [--clients 1000] [--samples 10] [--rounds 5] [--model mlp] [--side 8]

A round of FedAvg is compared with a plain PyTorch loop that takes the same training steps with as little overhead as
PyTorch allows. `-cohortK` are engines that vectorise K clients per training step (`engine.cohort`). Each contestant
runs in a separate process; they take turns round by round. Evaluation is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.contest.works import synthetic
from benchmarks.cpu import answer, ask
from fedloom import Experiment, Recipe, Task, objectives
from fedloom.data import Dataset, Federation
from fedloom.models import Factory, build

LR, TESTED = 0.01, 10
ENGINES = ("inline", "processes", "inline-cohort50", "processes-cohort50")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10, help="training samples per client")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--side", type=int, default=8, help="width and height of the images, of one channel")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), help="-cohortK: K clients per step")
    parser.add_argument("--workers", type=int, default=2, help="workers of the engine `processes`")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        take_part(options)
    else:
        contest(options)


def contest(options: argparse.Namespace) -> None:
    """Let the contestants take turns round by round, and print the table."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    running: dict[str, subprocess.Popen[str]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *options.engines)}
    try:
        for name in seconds:
            command = [sys.executable, "-m", "benchmarks.overhead", *sys.argv[1:], "--contestant", name]
            running[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
            )
        for process in running.values():
            answer(process)  # wait until it is ready
        for _ in range(1 + options.rounds):
            for name, process in running.items():
                seconds[name].append(ask(process)["seconds"])
    finally:
        for process in running.values():
            assert process.stdin is not None
            process.stdin.close()  # a contestant exits at the end of its input
        for process in running.values():
            process.wait()
    table({name: statistics.median(each[1:]) for name, each in seconds.items()}, options)


def table(seconds: dict[str, float], options: argparse.Namespace) -> None:
    steps = -(-options.samples // options.batch)
    print(
        f"FedAvg, {options.clients:,} clients of {options.samples} samples, {options.model} on {options.side}×"
        f"{options.side}, {steps} step(s) each; median of {options.rounds} rounds, contestants take turns"
    )
    print(
        "{:<20}{:>9}{:>10}{:>14}{:>10}{:>20}".format("", "workers", "s/round", "µs/client", "× plain", "overhead, µs")
    )
    plain = 1e6 * seconds["plain"] / options.clients
    for name, value in seconds.items():
        workers = options.workers if name.startswith("processes") else 1
        each = 1e6 * value / options.clients
        print(f"{name:<20}{workers:>9}{value:>10.3f}{each:>14.0f}{each / plain:>10.2f}{each - plain / workers:>20.0f}")
    print("overhead: wall time per client minus that of plain (with several workers, divided by their number)")


def take_part(options: argparse.Namespace) -> None:
    """Run one contestant: for each line of input, run a round and print a line with its result."""
    torch.set_num_threads(1)
    dataset = synthetic(options.clients * options.samples + TESTED, (1, options.side, options.side))
    *train, test = np.split(np.arange(len(dataset)), np.arange(1, options.clients + 1) * options.samples)
    federation = Federation(train=train, test=[test] * options.clients)
    tell({})
    if options.contestant == "plain":
        plain_rounds(dataset, federation, options)
    else:
        fedloom_rounds(dataset, federation, options, lambda record: tell({"seconds": record["train_seconds"]}))


def tell(values: dict[str, Any]) -> None:
    """Print a line and wait for one; exit if the input has ended."""
    print(json.dumps(values), flush=True)
    if not sys.stdin.readline():
        raise SystemExit


def fedloom_rounds(
    dataset: Dataset, federation: Federation, options: argparse.Namespace, on_round: Callable[[Any], None]
) -> None:
    engine, _, cohort = options.contestant.partition("-cohort")
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        values = {
            "method": "fedavg",
            "model": options.model,
            "training": {"rounds": 2 + options.rounds, "batch_size": options.batch, "optimizer": {"lr": LR}},
            "evaluation": {"every": 10**6, "clients": 1},
            "storage": {"personal_models": False},
            "engine": {
                "name": engine,
                "device": "cpu",
                "workers": options.workers if engine == "processes" else None,
                "cohort": int(cohort) if cohort else None,
            },
            "out": str(Path(folder) / "run"),
        }
        task = Task(dataset, federation, Factory(options.model), objectives.get("labels"))
        Experiment(Recipe.parse(values), task=task, on_round=on_round).run()


def plain_rounds(dataset: Dataset, federation: Federation, options: argparse.Namespace) -> None:
    """Run FedAvg with one model for all clients, prepared tensors, autograd, torch.optim.SGD and a running sum."""
    torch.manual_seed(0)
    model = build(options.model, shape=dataset.inputs.shape[1:], classes=len(dataset.classes))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR)
    held = [((dataset.inputs[part].float() / 255 - 0.5) / 0.5, dataset.labels[part]) for part in federation.train]
    while True:
        start = perf_counter()
        plain_round(model, parameters, optimizer, held, options.batch)
        tell({"seconds": perf_counter() - start})


def plain_round(
    model: nn.Module,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    held: list[tuple[torch.Tensor, torch.Tensor]],
    batch: int,
) -> None:
    """Train all clients, and store the mean of their models in `model`."""
    server = [parameter.detach().clone() for parameter in parameters]
    total = [torch.zeros_like(value) for value in server]
    for x, y in held:
        with torch.no_grad():
            for parameter, value in zip(parameters, server, strict=True):
                parameter.copy_(value)
        for some in torch.randperm(len(y)).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
        with torch.no_grad():
            for sum, parameter in zip(total, parameters, strict=True):
                sum += parameter
    with torch.no_grad():
        for parameter, sum in zip(parameters, total, strict=True):
            parameter.copy_(sum / len(held))


if __name__ == "__main__":
    main()
