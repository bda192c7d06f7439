"""Accuracy with hostile clients, and success of a backdoor, for every attack and every defence.

    python -m benchmarks.hostile [--seeds 0 1 2] [--methods fedavg repper+logreg fedcrl] [--store FILE]
    python -m benchmarks.hostile --status        # how many runs are stored, and the tables of these

scikit-learn's digits (recipe `digits-skewed`) on 25 clients by Dir(0.1), of which 5 are hostile. These numbers are
those of Karimireddy et al. (2022): 25 clients in buckets of two are 13 buckets, which Krum needs for 5 attackers.
Figures are in percent after the last round, as means over the honest clients: mean ± sample deviation (n − 1) over
seeds. Hostile clients are left out: their figures are irrelevant. Backdoor success is the share of test images of
other classes that are predicted as the target class once they have the trigger.

Each run is stored as a line of JSON. A benchmark that was stopped continues with the runs that are missing.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.core.errors import RunError
from fedloom.core.scores import BACKDOOR
from fedloom.core.trigger import Trigger
from fedloom.experiment.loop import Experiment
from fedloom.trust.attack import Attack, AttackSettings

CLIENTS, SHARE, ATTACKERS = 25, 0.2, 5
NONE = "none"
ATTACKS: dict[str, dict[str, Any]] = {
    NONE: {},
    "signflip": {"kind": "signflip"},
    "scale": {"kind": "scale"},
    "noise": {"kind": "noise"},
    "alie": {"kind": "alie"},
    "ipm": {"kind": "ipm"},
    "labelflip": {"kind": "labelflip"},
    "backdoor": {"kind": "backdoor"},
}
RADIUS = {"fedavg": 2.0, "repper+logreg": 2.0, "fedcrl": 8.0}
"""Radius of clipping: rounded median norm of updates without an attack (1.9, 1.8, 8.5; FedCRL sends prototypes)."""
DEFENCES: dict[str, dict[str, Any] | None] = {
    "mean (no rule)": None,
    "mean, uniform weights": {"rule": "clip", "clip": 1e9},
    "clip": {"rule": "clip"},
    "centred": {"rule": "centred"},
    "centred, momentum 0.9": {"rule": "centred", "momentum": 0.9},
    "median": {"rule": "median"},
    "trimmed 0.2": {"rule": "trimmed", "trim": 0.2},
    "krum": {"rule": "krum", "attackers": ATTACKERS},
    "multikrum": {"rule": "multikrum", "attackers": ATTACKERS},
    "geometric": {"rule": "geometric"},
    "buckets of 2, median": {"rule": "median", "bucket": 2},
    "buckets of 2, krum": {"rule": "krum", "attackers": ATTACKERS, "bucket": 2},
    "buckets of 2, multikrum": {"rule": "multikrum", "attackers": ATTACKERS, "bucket": 2},
    "buckets of 2, geometric": {"rule": "geometric", "bucket": 2},
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    attack: str
    defence: str
    seed: int
    rounds: int


Stored = dict[Cell, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=RADIUS, default=list(RADIUS))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=list(DEFENCES), metavar="DEFENCE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--store", type=Path, default=Path("build/hostile.jsonl"), help="file of finished runs")
    parser.add_argument("--status", action="store_true", help="run nothing; show what is stored")
    options = parser.parse_args()
    wanted = list(cells(options))
    stored = read(options.store)
    if not options.status:
        options.store.parent.mkdir(parents=True, exist_ok=True)
        for cell in wanted:
            if cell not in stored:
                stored[cell] = run(cell)
                append(options.store, asdict(cell) | stored[cell])
    found = {cell: stored[cell] for cell in wanted if cell in stored}
    seconds = [values["seconds"] for values in found.values()]
    left = (len(wanted) - len(found)) * float(np.mean(seconds)) / 60 if seconds else float("nan")
    print(f"{len(found)} of {len(wanted)} runs, {sum(seconds) / 60:.0f} minutes; about {left:.0f} minutes left")
    print(f"digits, {CLIENTS} clients by Dir(0.1), {ATTACKERS} hostile, {options.rounds} rounds, seeds {options.seeds}")
    for method in options.methods:
        print("\n".join(("", *table(method, options.attacks, options.defences, found))))


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield all runs, seed after seed, so that a part of them already fills the tables."""
    for seed in options.seeds:
        for method in options.methods:
            for attack in options.attacks:
                for defence in options.defences:
                    yield Cell(method, attack, defence, seed, options.rounds)


def read(path: Path) -> Stored:
    """Return the stored runs. A line that was cut off when the benchmark was killed is left out."""
    found: Stored = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        cell = Cell(**{name: values.pop(name) for name in Cell.__dataclass_fields__})
        found[cell] = values
    return found


def append(path: Path, values: dict[str, Any]) -> None:
    """Add a line to the file; a line that was cut off stays a line alone."""
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps(values) + "\n")


def run(cell: Cell) -> dict[str, Any]:
    """Return accuracy and backdoor success over honest clients; None if the run failed, or without a trigger."""
    start = perf_counter()
    found: dict[str, Any] = {"accuracy": None, "backdoor": None}
    with tempfile.TemporaryDirectory(prefix="fedloom-hostile-") as folder:
        experiment = Experiment(recipe_of(cell, Path(folder) / "run"))
        if cell.attack == NONE:  # how often a clean model predicts the target class for triggered images
            experiment.setup = replace(experiment.setup, trigger=Trigger(target=0, size=2))
        try:
            experiment.run()
        except RunError as error:
            return found | {"failed": str(error), "seconds": perf_counter() - start}
        hostile = Attack(AttackSettings(share=SHARE), experiment.sampling.trainers, cell.seed).hostile
        honest = [scores for scores in experiment.scores if scores.client not in hostile and sum(scores.total)]
    found["accuracy"] = float(np.mean([scores.accuracy for scores in honest]))
    success = [value for scores in honest if (value := scores.metrics.get(BACKDOOR)) is not None]
    found["backdoor"] = float(np.mean(success)) if success else None
    return found | {"seconds": perf_counter() - start}


def recipe_of(cell: Cell, out: Path) -> Recipe:
    values = read_yaml("digits-skewed")
    values.pop("compare")
    values["data"]["clients"] = CLIENTS
    # fewer and larger steps than in the recipe, so that a thousand runs take less than an hour
    values["training"] = {
        "rounds": cell.rounds, "epochs": 1, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.01},
    }  # fmt: skip
    defence, attack = DEFENCES[cell.defence], ATTACKS[cell.attack]
    if defence is not None and defence["rule"] in ("clip", "centred"):
        defence = {"clip": RADIUS[cell.method]} | defence
    return Recipe.parse(
        values
        | {
            "method": cell.method, "seed": cell.seed, "out": str(out), "engine": "inline", "robust": defence,
            "attack": attack | {"share": SHARE} if attack else None,
            "evaluation": {"every": cell.rounds},
            "storage": {"personal_models": False, "checkpoint_every": 0, "final_checkpoint": False},
        }
    )  # fmt: skip


def table(method: str, attacks: list[str], defences: list[str], stored: Stored) -> Iterator[str]:
    """Yield a Markdown table of accuracies, with the success of the backdoor in the last column."""
    columns = [(attack, "accuracy") for attack in attacks]
    columns += [(attack, "backdoor") for attack in ("backdoor", NONE) if attack in attacks]
    heads = [attack if figure == "accuracy" else f"success, {attack}" for attack, figure in columns]
    yield f"| {method} | " + " | ".join(heads) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for defence in defences:
        of_defence = {c: v for c, v in stored.items() if (c.method, c.defence) == (method, defence)}
        values = [
            shown([value[figure] for cell, value in of_defence.items() if cell.attack == attack])
            for attack, figure in columns
        ]
        yield f"| {defence} | " + " | ".join(values) + " |"


def shown(values: list[float | None]) -> str:
    """Return mean ± sample deviation in percent; the number of failed runs if there are any."""
    known = [100 * value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} failed"
    if not known:
        return "–"
    return f"{np.mean(known):.1f}" + (f" ± {np.std(known, ddof=1):.1f}" if len(known) > 1 else "")


if __name__ == "__main__":
    main()
