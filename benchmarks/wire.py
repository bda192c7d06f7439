"""Effect of message compression: bytes that a client sends and receives per round, and accuracy, for each encoding.

    python benchmarks/wire.py [--seeds 0 1 2] [--methods fedavg fedcrl] [--rounds 20]

The federation is that of the recipe `digits-skewed` (scikit-learn's digits, 20 clients, Dir(0.1)). Accuracies are after
the last round, in percent, mean ± standard deviation over seeds: of the global model if the method has one, otherwise
of the personal models.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.experiment.loop import Experiment

FORMS = [
    ("none", "none"),
    ("fp16", "none"),
    ("bf16", "none"),
    ("int8", "none"),
    ("topk:0.1", "none"),
    ("topk:0.01", "none"),
    ("fp16", "fp16"),
    ("int8", "int8"),
    ("topk:0.1", "fp16"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedcrl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--forms", nargs="+", metavar="UP/DOWN", default=["/".join(form) for form in FORMS])
    options = parser.parse_args()
    print(f"digits, 20 clients by Dir(0.1), {options.rounds} rounds; mean ± std over seeds {options.seeds}")
    print(f"{'method':<8} {'up':<10} {'down':<6} {'bytes up':>9} {'bytes down':>11} {'× smaller':>10}   accuracy %")
    for method in options.methods:
        whole = 0
        for up, down in (form.split("/") for form in options.forms):
            runs = [summary(method, up, down, seed, options.rounds) for seed in options.seeds]
            sent, got = runs[0]["up_bytes"], runs[0]["down_bytes"]
            whole = whole or sent + got
            shown = "global" if runs[0]["global_accuracy"] is not None else "personal"
            each = [100 * run[f"{shown}_accuracy"] for run in runs]
            figure = f"{np.mean(each):.1f} ± {np.std(each):.1f} {shown}"
            print(
                f"{method:<8} {up:<10} {down:<6} {sent:>9,} {got:>11,} {whole / (sent + got):>10.1f}   {figure}",
                flush=True,
            )


def summary(method: str, up: str, down: str, seed: int, rounds: int) -> dict:
    values = read_yaml("digits-skewed")
    values.pop("compare", None)
    recipe = Recipe.parse(values).with_(
        f"training.rounds={rounds}", f"evaluation.every={rounds}", f"wire.up={up}", f"wire.down={down}",
        method=method, seed=seed, engine={"name": "inline", "device": "cpu"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return Experiment(recipe.with_(out=Path(folder) / "run")).run()


if __name__ == "__main__":
    main()
