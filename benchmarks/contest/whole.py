"""A whole training, timed from the start of its process: `python -m benchmarks.contest.whole SPEC FILE`.

Only the standard library is imported before the clock is read, so that the time includes imports.
"""

import json
import sys
from pathlib import Path
from time import time
from typing import Any

EVERY = 10
"""Rounds between evaluations, as in pfl-research's benchmark."""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Train a recipe through the public API; seconds are counted from `spec["began"]`, the start of the process."""

    def now() -> float:
        return time() - spec["began"]

    started = now()
    from fedloom import Experiment, Recipe

    imported = now()
    ends: list[float] = []
    records: list[dict[str, Any]] = []

    def on_round(record: dict[str, Any]) -> None:
        ends.append(now())
        records.append(record)

    experiment = Experiment(Recipe.parse(spec["recipe"], trust_code=True), on_round=on_round)
    loaded = now()
    experiment.run()
    begun = ends[0] - records[0]["seconds"]
    return {
        "started": started,
        "imports": imported - started,
        "loading": loaded - imported,
        "building": begun - loaded,
        "first round": ends[0],
        "training": sum(record["train_seconds"] for record in records),
        "evaluation": sum(record["seconds"] - record["train_seconds"] for record in records),
        "rounds": len(records),
        "median": sorted(record["train_seconds"] for record in records)[len(records) // 2],
        "accuracy": records[-1]["global_accuracy"],
        "loss": records[-1]["loss"],
    }


def main() -> None:
    spec, file = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()
    file.write_text(json.dumps(run(spec)))


if __name__ == "__main__":
    main()
