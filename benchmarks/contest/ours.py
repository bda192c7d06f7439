"""fedloom as a contestant: `inline` (eager), `auto` (all defaults), variants of `lanes`, and Ray workers.

`lanes-bf16-cl-compile@8` has 8 lanes; `lanes-tf32-cohort25@2` two cohorts of 25 clients; `ray-float32@2` two
workers that share the GPU.
"""

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contest.works import Clock, Work, steps_and_images
from fedloom import Experiment, Recipe

PRECISIONS = ("float32", "tf32", "bf16")


def engine(name: str, device: str, lanes: int | None) -> dict[str, Any]:
    """Return the engine section of a recipe; on a CPU (a trial), `inline` replaces every variant of lanes."""
    if name == "auto":
        return {"name": "auto", "device": "cpu"} if device == "cpu" else {"name": "auto"}
    if name == "inline" or device == "cpu":
        return {"name": "inline", "device": device}
    variant, _, count = name.partition("@")
    kind, precision, *flags = variant.split("-")
    cohorts = [int(flag.removeprefix("cohort")) for flag in flags if flag.startswith("cohort")]
    known = {"cl", "compile", "deterministic", *(f"cohort{size}" for size in cohorts)}
    if kind not in ("lanes", "ray") or precision not in PRECISIONS or set(flags) - known:
        kinds = "|".join(PRECISIONS)
        raise SystemExit(
            f"'{name}' is not a contestant: must be auto, inline or "
            f"(lanes|ray)-({kinds})[-cl][-compile][-deterministic][-cohortK][@N]"
        )
    section: dict[str, Any] = {"name": kind, "device": device, "precision": precision}
    section |= {"channels_last": True} if "cl" in flags else {}
    section |= {"cohort": cohorts[0]} if cohorts else {}
    section |= {flag: True for flag in ("compile", "deterministic") if flag in flags}
    workers = int(count) if count else lanes
    if kind == "ray":  # the server stays on the CPU
        section |= {"device": "cpu", "worker_gpus": 1 / (workers or 1)}
    return section | ({"workers": workers} if workers else {})


def precision(name: str) -> str:
    """Return the precision of the floor for a contestant; torch's defaults (TF32 in convolutions) count as tf32."""
    if name == "auto":
        return "float32"
    return next((p for p in PRECISIONS if name.startswith((f"lanes-{p}", f"ray-{p}"))), "tf32")


def run(work: Work, name: str, device: str, lanes: int | None, warmup: int, rounds: int) -> dict[str, Any]:
    """Run all rounds; a round's time is its record's `train_seconds`."""
    task = work.task()
    clock = Clock(device)
    records: list[dict[str, Any]] = []
    ends: list[float] = []

    def on_round(record: dict[str, Any]) -> None:
        ends.append(clock.now())
        records.append(record)

    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        values = work.recipe(
            training={"rounds": warmup + rounds},
            evaluation={"every": 10**6, "clients": 1},
            storage={"personal_models": False},
            engine=engine(name, device, lanes),
            out=str(Path(folder) / "run"),
        )
        Experiment(Recipe.parse(values, trust_code=True), task=task, on_round=on_round).run()
    draws = work.draws(task, warmup + rounds)[warmup:]
    steps, images = steps_and_images(task, draws, work.batch, drop_last=False)
    # A check of train_seconds: synchronised, with all bookkeeping. The last round is excluded, since it evaluates.
    between = [after - before for before, after in pairwise(ends)][warmup - 1 : -1]
    return {
        "seconds": [record["train_seconds"] for record in records[warmup:]],
        "wall": statistics.median(between) if between else None,
        "warmup": ends[warmup - 1] - clock.begin,
        "steps": steps,
        "images": images * work.views,
        "memory": clock.memory(),
        "loss": records[-1]["loss"],
    }
