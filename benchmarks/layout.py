"""Memory layouts on a CPU: training steps of small networks with channels first and channels last.

    python -m benchmarks.layout [--models cnn2 cnn4 resnet20] [--batches 10 32 64] [--steps 4] [--repeats 5]

Each figure is the least CPU time of a step, which depends less on other processes than the time on the clock. The two
layouts take turns. `same` says whether the weights after these steps are equal bit for bit. `pooling` is the speed-up
by `fedloom.models.MaxPool2d`, which keeps the bits, over `torch.nn.MaxPool2d`, with channels first.
"""

import argparse
from time import process_time
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.contest.works import synthetic
from fedloom import Task, objectives
from fedloom.core.execution import launch
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.setup import Precision, Setup
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Federation
from fedloom.methods import get
from fedloom.models import Factory, MaxPool2d

LAYOUTS = ("torch's pooling", "first", "last")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["cnn2", "cnn4", "resnet20"])
    parser.add_argument("--batches", nargs="+", type=int, default=[10, 32, 64])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"FedAvg, a client's step on 32×32×3, one thread; CPU ms, least of {options.repeats} times the mean of "
        f"{options.steps} steps"
    )
    head = ("", "batch", "channels first", "channels last", "×", "same", "pooling")
    print("{:<10}{:>6}{:>16}{:>16}{:>9}{:>7}{:>10}".format(*head))
    for model in options.models:
        for batch in options.batches:
            seconds, weights = measure(model, batch, options.steps, options.repeats)
            pooled, first, last = (1e3 * seconds[layout] for layout in LAYOUTS)
            same = {layout: torch.equal(weights[layout], weights["first"]) for layout in LAYOUTS}
            if not same["torch's pooling"]:
                raise SystemExit(f"{model}, batch {batch}: MaxPool2d changes the weights")
            print(
                f"{model:<10}{batch:>6}{first:>16.2f}{last:>16.2f}{first / last:>9.2f}"
                f"{'yes' if same['last'] else 'no':>7}{pooled / first:>10.2f}"
            )


def measure(model: str, batch: int, steps: int, repeats: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the seconds of a step, and the weights after the first client, for each layout."""
    dataset = synthetic(batch * steps + 1)
    every = torch.arange(len(dataset)).numpy()
    task = Task(dataset, Federation([every[:-1]], [every[-1:]]), Factory(model, {}), objectives.get("labels"))
    setup = Setup(task, get("fedavg"), Training(batch_size=batch), seed=0)
    workspaces = {layout: Workspace(setup, precision=Precision(channels_last=layout == "last")) for layout in LAYOUTS}
    message = Message(workspaces["first"].downward())
    seconds: dict[str, float] = {}
    weights: dict[str, torch.Tensor] = {}
    for _ in range(1 + repeats):
        for layout, workspace in workspaces.items():
            forward = nn.MaxPool2d.forward if layout == "torch's pooling" else MaxPool2d.forward
            with patch.object(MaxPool2d, "forward", forward):
                start = process_time()
                sent = launch(workspace, Job("update", 1, message, client=0)).read().message
                taken = (process_time() - start) / steps
            assert sent is not None
            if layout in weights:  # the first turn is a warm-up
                seconds[layout] = min(taken, seconds.get(layout, taken))
            weights[layout] = torch.cat([tensor.flatten() for _, tensor in sent.items()]).clone()
    return seconds, weights


if __name__ == "__main__":
    main()
