"""Regression check for refactorings: hashes of all results that a change of structure must not change.

    python -m benchmarks.net record after.json                      # this checkout
    python -m benchmarks.net record before.json --commit 286b5da    # an older commit, on the same machine
    python -m benchmarks.net compare before.json after.json
    python -m benchmarks.net agree after.json                       # whether all engines give the same numbers
    python -m benchmarks.net record gpu.json --engines inline lanes # on a GPU, in deterministic mode

A case is a small run through the public API. Its hash covers the final weights, the per-client results, the metrics of
every round, the summary and the ledger: all values, sorted, without timings and field names.
"""

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

METHODS = (
    "apfl", "centralized", "ditto", "fedadagrad", "fedadam", "fedala", "fedamp", "fedas", "fedavg", "fedavgm",
    "fedbabu", "fedbn", "fedcka", "fedcp", "fedcrc", "fedcrl", "feddbe", "feddyn", "fedgh", "fedintr", "fedlc",
    "fednova", "fedpac", "fedper", "fedproto", "fedprox", "fedrep", "fedrod", "fedstyle", "fedtgp", "fedyogi", "gpfl",
    "lgfedavg", "local", "moon", "perfedavg", "pfedme", "repper", "scaffold", "untrained",
)  # fmt: skip
ADDONS = ("ft", "linear", "mlp", "svm", "logreg", "probe")
OBJECTIVES = ("labels", "simclr", "simsiam", "byol", "moco", "barlow")
RULES = ("clip", "median", "trimmed", "krum", "multikrum", "geometric")
NEEDS = {"clip": {"clip": 0.5}, "trimmed": {"trim": 0.2}, "krum": {"attackers": 1}, "multikrum": {"attackers": 1}}
WIRES = ("fp16", "bf16", "int8", "topk:0.05")
ENGINES = ("inline", "processes", "replay")
TIMINGS = ("seconds", "train_seconds", "run_dir", "code")
BASE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 160, "clients": 5, "partition": "dirichlet:1", "newcomers": 1, "minimum": 5},
    "model": {"name": "mlp"},
    "training": {"rounds": 2, "batch_size": 16, "fraction": 0.7},
    "storage": {"checkpoint_seconds": 0},
}
ARRAYS = {
    "table": ("fedavg", "fedper", "fedproto", "fedavg+logreg"),
    "binary": ("fedavg", "fedproto", "fedcrc", "fedgh", "fedpac", "moon", "repper", "fedavg+linear"),
    "multilabel": ("fedavg+ft", "ditto", "scaffold", "perfedavg", "apfl", "fedcka", "fedproto"),
    "signal": ("fedavg", "fedcrl", "repper", "fedcka"),
    "images": ("fedavg", "fedcrl", "repper", "fedbn"),
    "clients": ("fedavg+ft", "ditto", "fedproto"),
}
"""Methods of the cases on arrays: a table by the kind of its labels, signals, float images, clients' test samples."""
FIGURES = {
    "table": ["balanced_accuracy", "macro_f1", "auc", "ece", "loss"],
    "binary": ["balanced_accuracy", "f1", "auc", "ece"],
    "multilabel": ["exact_match", "macro_f1", "micro_f1", "auc", "ece", "loss"],
}
Case = dict[str, Any]


def merged(*recipes: Case) -> Case:
    """Merge recipes section by section; later recipes override earlier ones."""
    whole: Case = {}
    for recipe in recipes:
        for name, value in recipe.items():
            whole[name] = whole[name] | value if isinstance(value, dict) and name in whole else value
    return whole


def cases(engines: tuple[str, ...]) -> Iterator[tuple[str, Case]]:
    """Yield names and recipes.

    A case with the extra key `resume` is interrupted after its second round. The extra keys `arrays` and `network` are
    kinds of data and networks that are passed as objects.
    """
    for engine in engines:
        runs = {"engine": {"name": engine, "deterministic": engine in ("inline", "lanes")}}
        if engine in ("processes", "replay", "ray"):
            runs["engine"]["workers"] = 2
        for name, recipe in _cases():
            yield f"{engine} {name}", merged(BASE, runs, recipe)


def _cases() -> Iterator[tuple[str, Case]]:
    three = {"training": {"rounds": 3, "fraction": 1.0}}
    for method in METHODS:
        yield method, {"method": method}
        for addon in ADDONS:
            yield f"{method}+{addon}", {"method": f"{method}+{addon}"}
        for objective in OBJECTIVES:
            yield f"{method} {objective}", {"method": method, "objective": {"name": objective}}
        yield (
            f"{method} cnn2",
            {"method": method, "model": {"name": "cnn2"}, "data": {"size": 16, "augment": ["crop:1", "flip"]}},
        )
        yield f"{method} resnet20", {"method": method, "model": {"name": "resnet20"}, "training": {"fraction": 0.3}}
        yield (
            f"{method} adam",
            {"method": method, "training": {"optimizer": {"name": "adam", "lr": 0.01, "keep": True}}},
        )
        yield f"{method} resume", merged(three, {"method": method, "resume": 2})
        yield (
            f"{method} faults",
            merged(
                three, {"method": method, "faults": {"drop": 0.2, "crash": 0.2, "nan": 0.2}, "data": {"clients": 8}}
            ),
        )
        yield (
            f"{method} skips",
            merged(
                three, {"method": method, "faults": {"raises": 0.4}, "training": {"on_error": "skip", "min_clients": 2}}
            ),
        )
        for rule in RULES:
            robust = {"robust": {"rule": rule} | NEEDS.get(rule, {}), "data": {"clients": 8}}
            yield f"{method} robust {rule}", merged(three, {"method": method}, robust)
        for kind in ("signflip", "scale", "noise"):
            yield f"{method} attack {kind}", merged(three, {"method": method, "attack": {"kind": kind}})
        for sampling in ("fixed", "poisson"):
            privacy = {"clip": 1.0, "noise": 1.0, "sampling": sampling}
            yield f"{method} privacy {sampling}", {"method": method, "privacy": privacy}
        for wire in WIRES:
            down = "int8" if wire.startswith("topk") else wire
            yield f"{method} wire {wire}", merged(three, {"method": method, "wire": {"up": wire, "down": down}})
        yield (
            f"{method} wire faults",
            merged(three, {"method": method, "wire": {"up": "bf16", "down": "none"}, "faults": {"nan": 0.4}}),
        )
    for method in ("fedavg", "fedrep", "ditto", "fedcrl", "fedproto", "repper", "apfl", "moon"):
        frozen, lora = {"freeze": ["extractor"]}, {"lora": {"rank": 2}}
        small = {"name": "vit", "width": 16, "depth": 1, "heads": 2}
        yield f"{method} frozen", {"method": method, "model": {"name": "mlp"} | frozen}
        yield f"{method} frozen augmented", {"method": method, "model": frozen, "data": {"augment": ["crop:1"]}}
        yield f"{method} frozen resume", merged(three, {"method": method, "model": frozen, "resume": 2})
        yield f"{method} lora", {"method": method, "model": {"name": "mlp"} | lora}
        yield f"{method} lora vit", {"method": method, "model": small | lora}
        yield f"{method} lora resume", merged(three, {"method": method, "model": lora, "resume": 2})
    yield "styles", {"data": {"name": "digits+digits", "partition": "domain", "clients": 4}, "method": "fedstyle"}
    yield "distance", {"method": "fedrep", "evaluation": {"distance": "model.head", "every": 2}}
    yield "evaluated", {"method": "fedper", "evaluation": {"clients": 2, "summary": "median:2"}}
    yield "schedule", merged(three, {"method": "fedavg", "training": {"schedule": "cosine"}})
    yield from _kinds()
    yield from _trainings(three)


def _kinds() -> Iterator[tuple[str, Case]]:
    """Yield cases on data and networks that are passed as objects."""
    for kind, methods in ARRAYS.items():
        for method in methods:
            data = {"partition": "iid" if kind == "multilabel" else "natural" if kind == "clients" else "dirichlet:1"}
            metrics = {"metrics": FIGURES.get(kind, FIGURES["table"]), "measure": "auc"}
            recipe: Case = {"method": method, "arrays": kind, "data": data, "evaluation": metrics}
            if kind in ("binary", "multilabel"):
                recipe["objective"] = {"name": kind}
            if kind == "images":
                recipe["model"] = {"name": "cnn2"}
                recipe["data"] = data | {"augment": ["crop:1", "flip"], "normalise": "federated"}
            if kind == "clients":
                recipe["data"] = data | {"split": "common:0.8", "newcomers": 0}
            yield f"{kind} {method}", recipe
    yield "table simclr", {"method": "fedavg", "arrays": "table", "objective": {"name": "simclr"}}
    yield "binary weighted", {"arrays": "binary", "objective": {"name": "binary", "pos_weight": 3.0}}
    for network in ("linear", "frozen layer", "recurrent", "tied"):
        for method in ("fedavg", "fedrep", "ditto", "fedcrl"):
            yield f"network {network} {method}", {"method": method, "arrays": "table", "network": network}


def _trainings(three: Case) -> Iterator[tuple[str, Case]]:
    """Yield cases of optimizers, label smoothing, warmup, validation samples and early stopping."""
    for method in ("fedavg", "ditto", "scaffold"):
        for name, lr in (("adamw", 0.01), ("lion", 0.003)):
            optimizer = {"name": name, "lr": lr, "weight_decay": 0.05}
            yield f"{method} {name}", {"method": method, "training": {"optimizer": optimizer}}
    for method in ("fedavg", "fedpac", "moon"):
        yield f"{method} smoothing", {"method": method, "objective": {"name": "labels", "smoothing": 0.1}}
    for method in ("fedavg", "apfl", "pfedme"):
        gentle = {"warmup": 2, "optimizer": {"name": "sgd", "lr": 0.1, "clip": 0.5}}
        yield f"{method} warmup", merged(three, {"method": method, "training": gentle})
    for method in ("fedavg", "fedrep", "fedcrl"):
        held_out = {"data": {"split": "pooled:0.5:0.25"}, "evaluation": {"metrics": FIGURES["table"], "measure": "ece"}}
        yield f"{method} validation", {"method": method, **held_out}
        patient = {"rounds": 6, "patience": 2, "fraction": 1.0}
        yield f"{method} patience", {"method": method, **held_out, "training": patient}
        yield f"{method} patience resume", {"method": method, **held_out, "training": patient, "resume": 2}


def record(engines: tuple[str, ...], only: str, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Run the cases whose name contains `only`, or every n-th of them, and return their hashes by name."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    first, step = share
    found: dict[str, str] = {}
    chosen = [case for case in cases(engines) if only in case[0]]
    for name, recipe in chosen[first::step]:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = outcome(recipe, Path(folder) / "run")
    return found


def outcome(recipe: Case, folder: Path) -> str:
    """Return the hash of a run, or the type of the error that it ends with (error messages may change)."""
    import fedloom

    recipe = deepcopy(recipe)  # cases share sections, which are changed below
    stop, arrays, network = (recipe.pop(name, None) for name in ("resume", "arrays", "network"))
    try:
        if arrays is not None:
            recipe["data"]["name"] = _data(arrays)
        if network is not None:
            recipe["model"]["name"] = _network(network)
        if stop is not None:
            _interrupted(recipe, folder, stop)
        fedloom.run(recipe, out=str(folder), resume=stop is not None)
    except Exception as error:
        return type(error).__name__
    return digest(folder)


def _data(kind: str) -> str:
    """Register random inputs, whose labels follow from a random linear map, and return the dataset's name."""
    import numpy as np

    from fedloom.data import from_arrays, from_clients
    from fedloom.runs.registration import register_dataset

    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, {"signal": 32, "images": 256}.get(kind, 8)))
    scores = x @ rng.normal(size=(x.shape[1], 4)) + rng.normal(size=(160, 4))
    labels = {"binary": (scores[:, 0] > 0).astype(int), "multilabel": (scores > 0).astype(int)}
    x = x.reshape(160, *{"signal": (2, 16), "images": (1, 16, 16)}.get(kind, (8,)))
    y = labels.get(kind, scores.argmax(1))
    if kind != "clients":
        return register_dataset(from_arrays(x, y, name=kind))
    rows = [slice(start, start + size) for start, size in ((0, 60), (60, 40), (100, 30), (130, 12))]
    each = {f"site {i}": {"train": (x[part], y[part]), "test": (x[142:], y[142:])} for i, part in enumerate(rows)}
    return register_dataset(from_clients(each))


def _network(kind: str) -> str:
    """Register a network for tables as a user would pass it, and return its name."""
    import torch
    from torch import nn

    from fedloom.runs.registration import register_model

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(1, 6, batch_first=True), nn.GRU(6, 6)
            self.fc = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.gru(self.lstm(x[..., None])[0].transpose(0, 1))[0][-1])

    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    layers = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), second, nn.Dropout(0.2), nn.Linear(8, 4))
    if kind == "frozen layer":
        first.requires_grad_(False)
    if kind == "tied":
        second.weight = first.weight
    return register_model({"linear": nn.Linear(8, 4), "recurrent": Recurrent()}.get(kind, layers))


def _interrupted(recipe: Case, folder: Path, after: int) -> None:
    """Interrupt a run, as with Ctrl-C, in a given round."""
    import signal

    import fedloom

    def on_round(record: Any) -> None:
        if record["round"] == after - 1:
            signal.raise_signal(signal.SIGINT)

    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        fedloom.run(recipe, out=str(folder), on_round=on_round)
    except KeyboardInterrupt:
        return
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def digest(folder: Path) -> str:
    """Return a hash of a run folder: weights, then the values of its other results."""
    import torch
    from safetensors import safe_open

    whole = hashlib.sha256()
    for path in sorted((folder / "models").glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                whole.update(f"{path.name} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for name in ("clients.jsonl", "metrics.jsonl"):
        for line in (folder / name).read_text().splitlines():
            whole.update(json.dumps(sorted(leaves(json.loads(line)))).encode())
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("notes")
    ledger = json.loads((folder / "ledger.json").read_text())["messages"]
    for values in (summary, ledger):
        whole.update(json.dumps(sorted(leaves(values))).encode())
    return whole.hexdigest()[:16]


def leaves(value: Any) -> Iterator[str]:
    """Yield the values inside nested records as text, without timings."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in TIMINGS:
                yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif not isinstance(value, bool) and value is not None:
        yield repr(value)


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Print the cases that differ, and return the exit code."""
    differ = [name for name in before | after if before.get(name) != after.get(name)]
    ran = sum(len(value) == 16 for value in after.values())
    for name in differ:
        print(f"{name}: {before.get(name, 'missing')} → {after.get(name, 'missing')}")
    print(f"{len(before)} cases before, {len(after)} after ({ran} runs, the rest refused): {len(differ)} differ")
    return 1 if differ else 0


def agree(found: dict[str, str]) -> int:
    """Print the cases whose results depend on the engine, and return the exit code."""
    by_case: dict[str, dict[str, str]] = {}
    for name, value in found.items():
        engine, _, case = name.partition(" ")
        by_case.setdefault(case, {})[engine] = value
    differ = {case: values for case, values in by_case.items() if len(set(values.values())) > 1}
    for case, values in differ.items():
        print(f"{case}: " + ", ".join(f"{engine} {value}" for engine, value in values.items()))
    engines = sorted({engine for values in by_case.values() for engine in values})
    refused = sum(all(len(value) != 16 for value in values.values()) for values in by_case.values())
    print(f"{len(by_case)} cases on {', '.join(engines)} ({refused} refused): {len(differ)} differ between engines")
    return 1 if differ else 0


def _shared_out(arguments: argparse.Namespace, source: Path) -> dict[str, str]:
    """Record in several single-threaded processes, with the package of a source tree."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")])
    script = [sys.executable, __file__, "record", "-", "--engines", *arguments.engines, "--only", arguments.only]
    shares = [
        subprocess.Popen(
            [*script, "--share", str(i), str(arguments.processes)], env=environment, stdout=subprocess.PIPE
        )
        for i in range(arguments.processes)
    ]
    found: dict[str, str] = {}
    for process in shares:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        found |= json.loads(output)
    return dict(sorted(found.items()))


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run all cases and write their hashes")
    recording.add_argument("file", help="JSON file to write")
    recording.add_argument("--commit", help="record an older commit (in a temporary worktree) instead of this tree")
    recording.add_argument("--engines", nargs="+", default=list(ENGINES))
    recording.add_argument("--only", default="", help="only cases whose name contains this")
    recording.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    recording.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    comparing = commands.add_parser("compare", help="compare two recorded files")
    comparing.add_argument("before")
    comparing.add_argument("after")
    agreeing = commands.add_parser("agree", help="compare the engines within one recorded file")
    agreeing.add_argument("file")
    arguments = parser.parse_args(words)
    if arguments.command == "agree":
        return agree(json.loads(Path(arguments.file).read_text()))
    if arguments.command == "compare":
        return compare(*(json.loads(Path(name).read_text()) for name in (arguments.before, arguments.after)))
    if arguments.share:
        print(json.dumps(record(tuple(arguments.engines), arguments.only, tuple(arguments.share))))
        return 0
    root = Path(__file__).resolve().parents[1]
    if arguments.commit:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            subprocess.run(["git", "worktree", "add", "--detach", tree, arguments.commit], cwd=root, check=True)
            try:
                found = _shared_out(arguments, tree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=root, check=True)
    else:
        found = _shared_out(arguments, root)
    Path(arguments.file).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} cases, {sum(len(value) == 16 for value in found.values())} of them runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
