"""Accuracy of FedAvg and RepPer with hostile clients, for the plain mean and each robust rule.

    python benchmarks/hostile.py [--seeds 0 1 2] [--strengths 1 10] [--methods fedavg repper+logreg]

In the demo's federation (scikit-learn's digits, 20 clients, Dir(0.1), 20 rounds), a fraction of the clients flips the
sign of its update. Figures are accuracies after the last round in percent, as means over the honest clients and then
over seeds. Hostile clients are left out: they falsify what they send, not what they keep, and their accuracy is
irrelevant.
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.experiment.build import make_task
from fedloom.experiment.loop import Experiment

RULES: dict[str, dict[str, Any] | None] = {
    "mean (no rule)": None,
    "mean, uniform weights": {"rule": "clip", "clip": 1e9},
    "clip 1.0": {"rule": "clip", "clip": 1.0},
    "median": {"rule": "median"},
    "trimmed 0.2": {"rule": "trimmed", "trim": 0.2},
    "krum, 4 attackers": {"rule": "krum", "attackers": 4},
    "multikrum, 4 attackers": {"rule": "multikrum", "attackers": 4},
    "geometric": {"rule": "geometric"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "repper+logreg"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0, 10.0])
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="number of concurrent runs")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        table(options, pool)


def table(options: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Print the table line by line, as the runs finish."""
    columns = [(method, strength) for method in options.methods for strength in (0.0, *options.strengths)]
    print(
        f"digits, 20 clients by Dir(0.1), {options.rounds} rounds; {options.share:.0%} of the clients send −s × their "
        f"update; accuracy of honest clients in %, mean ± std over seeds {options.seeds}"
    )
    print(f"{'':<24}" + "".join(f"{m if s == options.strengths[0] else '':^17}" for m, s in columns))
    print(f"{'':<24}" + "".join(f"{f's = {s:g}' if s else 'no attack':^17}" for _, s in columns))
    running = {
        (label, *column): [pool.submit(accuracy, options, *column, RULES[label], seed) for seed in options.seeds]
        for label in options.rules
        for column in columns
    }
    for label in options.rules:
        cells = []
        for column in columns:
            found = [100 * run.result() for run in running[label, *column]]
            cells.append(f"{np.mean(found):.1f} ± {np.std(found):.1f}")
        print(f"{label:<24}" + "".join(f"{cell:^17}" for cell in cells), flush=True)


def accuracy(
    options: argparse.Namespace, method: str, strength: float, rule: dict[str, Any] | None, seed: int
) -> float:
    """Return the mean accuracy of the clients that are honest with this seed, also for runs without an attack."""
    values = read_yaml("demo")
    values.pop("compare")
    values["training"]["rounds"] = options.rounds
    attack = {"kind": "signflip", "share": options.share, "strength": strength or 1.0}
    with tempfile.TemporaryDirectory(prefix="fedloom-hostile-") as folder:
        recipe = Recipe.parse(
            values
            | {
                "method": method, "seed": seed, "out": f"{folder}/run", "engine": "inline",
                "robust": rule, "attack": attack,
                "evaluation": {"every": options.rounds}, "storage": {"personal_models": False},
            }
        )  # fmt: skip
        experiment = Experiment(recipe, task=make_task(recipe))
        assert experiment.trust.attack is not None
        hostile = experiment.trust.attack.hostile
        if not strength:
            experiment.trust.attack = None
        experiment.run()
        rows = [json.loads(line) for line in Path(folder, "run", "clients.jsonl").read_text().splitlines()]
    return float(np.mean([row["accuracy"] for row in rows if row["client"] not in hostile]))


if __name__ == "__main__":
    main()
