"""Bytes and seconds per round of a pretrained network whose extractor is trained, frozen, or frozen with adapters.

    python -m benchmarks.frozen [--models vit cnn2] [--method fedavg] [--rounds 4] [--engine inline]

The federation is scikit-learn's digits at 28×28 pixels, 10 clients, Dir(0.5). Bytes are those that a client sends per
round. Seconds are those of training in a round, the median without the first one. `once` is the time that a run takes
before its first round, in which the features of a frozen extractor are computed.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from fedloom.config.recipe import Recipe
from fedloom.core.features import notes_of
from fedloom.experiment.loop import Experiment

FROZEN = {"freeze": ["extractor"]}
AUGMENT = ["crop:2", "flip"]
KINDS: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "trained": ({}, [], True),
    "trained, augmented": ({}, AUGMENT, True),
    "LoRA, rank 8": ({"lora": {"rank": 8}}, [], True),
    "frozen, augmented": (FROZEN, AUGMENT, True),
    "frozen, recomputed": (FROZEN, [], False),
    "frozen, cached": (FROZEN, [], True),
}
"""Options of the network, augmentation, and whether features may be cached."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "cnn2"])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--size", type=int, default=28, help="height and width of images")
    parser.add_argument("--limit", type=int, help="number of images; default: all 1,797")
    parser.add_argument("--engine", default="inline")
    options = parser.parse_args()
    print(
        f"{options.method} on digits at {options.size}×{options.size}, 10 clients, {options.engine}; a client's round"
    )
    print(f"{'model':<6} {'extractor':<20} {'bytes up':>10} {'s/round':>8} {'× faster':>9} {'once, s':>8}   features")
    for model in options.models:
        whole = 0.0
        for kind in KINDS:
            sent, seconds, once, cached = measure(kind, model, options)
            whole = whole or seconds
            print(
                f"{model:<6} {kind:<20} {sent:>10,} {seconds:>8.3f} {whole / seconds:>9.1f} {once:>8.2f}   {cached}",
                flush=True,
            )


def measure(kind: str, model: str, options: argparse.Namespace) -> tuple[int, float, float, str]:
    """Return bytes and seconds of a round, seconds before the first round, and whether features were cached."""
    network, augment, cache = KINDS[kind]
    recipe = Recipe.parse(
        {
            "data": {
                "name": "digits", "size": options.size, "clients": 10, "partition": "dirichlet:0.5", "augment": augment,
                "limit": options.limit,
            },
            "method": options.method,
            "model": {"name": model} | network,
            "training": {"rounds": options.rounds, "batch_size": 16},
            "evaluation": {"every": options.rounds},
            "engine": {"name": options.engine},
        }
    )  # fmt: skip
    started: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(
            recipe.with_(out=Path(folder) / "run"), on_round=lambda record: started.append(perf_counter())
        )
        experiment.setup = replace(experiment.setup, cache_features=cache)
        begin = perf_counter()
        experiment.run()
    rounds = experiment.history
    once = started[0] - begin - rounds[0]["seconds"]
    notes = notes_of(experiment.setup.feature_caches)
    cached = "" if "freeze" not in network else "cached" if any("once" in note for note in notes) else "recomputed"
    return rounds[0]["up_bytes"], median(record["train_seconds"] for record in rounds[1:] or rounds), once, cached


if __name__ == "__main__":
    main()
