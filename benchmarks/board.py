"""The leaderboard's time: PFLlib itself and fedloom, the same data and setting, extrapolated to 2,000 rounds.

    python -m benchmarks.board --pfllib PATH --data-dir DATA --rounds 5

PATH is a checkout of https://github.com/TsingZ0/PFLlib, whose files are used unmodified. Both evaluate all clients in
every round, as the leaderboard does. Each measurement runs in its own process; the first round, which includes one-time
work, is not counted.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.contest.peers import MissingError, write_npz
from fedloom import Experiment, Recipe, Task
from fedloom.data import Dataset
from fedloom.experiment.build import make_task
from fedloom.studies.table import cells_of, load_table

ROOT = Path(__file__).parents[1]
BOARD, ROUNDS = "pfllib/board", 2000
METHODS = {
    "fedavg": ("serveravg", "FedAvg"), "fedrep": ("serverrep", "FedRep"), "ditto": ("serverditto", "Ditto"),
    "fedala": ("serverala", "FedALA"), "feddbe": ("serverdbe", "FedDBE"),
}  # fmt: skip
"""PFLlib's module and class of each method."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pfllib", type=Path, help="checkout of PFLlib; without it, only fedloom is measured")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dataset", choices=["cifar100", "fashion-mnist"], default="cifar100")
    parser.add_argument("--data-dir", help="folder of datasets, as in data.dir")
    parser.add_argument("--samples", type=int, help="use this number of random images instead of the dataset")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--engine", default="auto", help="fedloom's engine")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # who and method: one measurement, in this process
    return parser.parse_args()


def recipe_of(method: str, asked: argparse.Namespace, out: str) -> Recipe:
    """Return the board's recipe of a method, with the rounds to measure."""
    cells = cells_of(BOARD, load_table(BOARD))
    at = {"dataset": asked.dataset, "division": "dir0.1"}
    cell = next(cell for cell in cells if cell.row == method and cell.column.at == at)
    changes = {"training.rounds": asked.rounds + 1, "engine.name": asked.engine, "storage.personal_models": False}
    if asked.samples:
        changes["data.minimum"] = 30  # its loaders drop the last partial batch, so fewer would be none
    return cell.recipe(changes | {"data.dir": asked.data_dir, "out": out})


def task_of(recipe: Recipe, asked: argparse.Namespace) -> Task:
    """Return the board's task; with `--samples`, of random images of the dataset's shape."""
    if not asked.samples:
        return make_task(recipe)
    shape, classes = ((3, 32, 32), 100) if asked.dataset == "cifar100" else ((1, 28, 28), 10)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (asked.samples, *shape), dtype=torch.uint8, generator=draw)
    labels = torch.randint(classes, (asked.samples,), generator=draw)
    made = Dataset(
        "random", images, labels, torch.zeros(asked.samples, dtype=torch.bool), tuple(map(str, range(classes)))
    )
    return make_task(recipe, made)


def ours(method: str, asked: argparse.Namespace) -> list[float]:
    """Return the seconds of each round of fedloom, with evaluation, after the first."""
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        recipe = recipe_of(method, asked, f"{folder}/run")
        experiment = Experiment(recipe, task=task_of(recipe, asked))
        experiment.run()
    return [record["seconds"] for record in experiment.history[1:]]


def theirs(method: str, asked: argparse.Namespace) -> list[float]:
    """Return the seconds of each round of PFLlib by its own clock, with evaluation, after the first."""
    if asked.pfllib is None:
        raise MissingError("--pfllib PATH is not given")
    source = asked.pfllib.resolve() / "system"
    if not (source / "flcore").is_dir():
        raise MissingError(f"{source} does not contain PFLlib")
    if importlib.util.find_spec("h5py") is None:  # for its results file, which is not written here
        sys.modules["h5py"] = ModuleType("h5py")
    sys.path.insert(0, str(source))
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        task = task_of(recipe_of(method, asked, f"{folder}/run"), asked)
        write_npz(task, Path(folder) / "dataset" / "bench", tested=None)
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # it reads ../dataset/bench
        module, name = METHODS[method]
        kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
        server = kind(_arguments(method, task, asked.rounds + 1), 0)
        server.save_results = server.save_global_model = lambda: None
        server.train()
        os.chdir("/")
    return [float(seconds) for seconds in server.Budget[1 : asked.rounds + 1]]


def _arguments(method: str, task: Task, rounds: int) -> SimpleNamespace:
    """Return the options that its main.py would parse for the leaderboard."""
    from flcore.trainmodel.models import BaseHeadSplit, FedAvgCNN  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FedAvgCNN(in_features=task.shape[0], num_classes=task.classes, dim=1600 if task.shape[1] == 32 else 1024)
    if method in ("fedavg", "fedrep", "feddbe"):
        head = deepcopy(model.fc)
        model.fc = nn.Identity()
        model = BaseHeadSplit(model, head)
    return SimpleNamespace(
        model=model.to(device), device=device, dataset="bench", num_classes=task.classes, algorithm=METHODS[method][1],
        goal="bench", batch_size=10, local_learning_rate=0.005, local_epochs=1, num_clients=task.clients,
        global_rounds=rounds, eval_gap=1, learning_rate_decay=False, learning_rate_decay_gamma=0.99,
        join_ratio=1.0, random_join_ratio=False, few_shot=0, time_select=False, time_threthold=10_000,
        save_folder_name="items", top_cnt=100, auto_break=False, client_drop_rate=0.0, train_slow_rate=0.0,
        send_slow_rate=0.0, dlg_eval=False, dlg_gap=100, batch_num_per_client=2, num_new_clients=0,
        fine_tuning_epoch_new=0, plocal_epochs=1, mu=0.1, eta=1.0, rand_percent=80, layer_idx=2, momentum=1.0,
        kl_weight=50.0,
    )  # fmt: skip


def measured(who: str, method: str) -> dict[str, Any]:
    """Run one measurement in its own process and return its result."""
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        file = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.board", *sys.argv[1:], "--part", who, method, "--json", str(file)]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}
        )
        if not file.exists():
            return {"failed": (done.stderr or done.stdout).strip().splitlines()[-1:]}
        return dict(json.loads(file.read_text()))


def part(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the measurement that `--part` asks for."""
    who, method = asked.part
    try:
        return {"seconds": (ours if who == "fedloom" else theirs)(method, asked)}
    except MissingError as reason:
        return {"skipped": str(reason)}


def row(method: str, found: dict[str, dict[str, Any]]) -> str:
    """Return a line of the table: seconds per round, hours of 2,000 rounds, and how many times faster fedloom is."""
    rounds = {who: median(one["seconds"]) for who, one in found.items() if one.get("seconds")}
    cells = [f"{rounds[who]:9.3f} {rounds[who] * ROUNDS / 3600:8.2f}" if who in rounds else " " * 18 for who in found]
    ratio = f"{rounds['pfllib'] / rounds['fedloom']:8.1f}" if len(rounds) == 2 else " " * 8
    why = "; ".join(
        f"{who}: {one.get('skipped') or one.get('failed')}" for who, one in found.items() if who not in rounds
    )
    return f"{method:<8} {' '.join(cells)} {ratio}  {why}".rstrip()


def main() -> None:
    asked = options()
    if asked.part:
        found = part(asked)
        asked.json.write_text(json.dumps(found))
        return
    print(f"{asked.dataset}, Dir(0.1), 20 clients, batch 10; median of {asked.rounds} rounds with evaluation")
    print(f"{'':8} {'fedloom s':>9} {'2000: h':>8} {'PFLlib s':>9} {'2000: h':>8} {'times':>8}")
    results = {}
    for method in asked.methods:
        results[method] = {who: measured(who, method) for who in ("fedloom", "pfllib")}
        print(row(method, results[method]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
