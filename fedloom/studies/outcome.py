"""What a finished run provides for a table: figures, a thinned curve, the machine and the commit."""

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from fedloom.config.recipe import Recipe
from fedloom.core.reading import read_json
from fedloom.engines import engine_class
from fedloom.experiment.files import write_whole
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.run_folder import finished, read_rounds, versions, write_json
from fedloom.experiment.summary import summarise
from fedloom.studies.results import BESIDE, CellResult, processors
from fedloom.studies.schema import BEST
from fedloom.studies.table import Cell

MACHINES = "machines.txt"
CODE = "code.json"
CURVE_POINTS = 40
STORED = ("_accuracy", "_std", "_weighted", "_worst", "loss", "distance")
"""Endings of the names of the metrics that are stored."""
CURVES = ("personal_accuracy", "global_accuracy", "loss", "personal_loss")
"""Metrics whose curves are stored in addition to the measures of the cells."""


def result_of(folder: Path, cells: Sequence[Cell], recipe: Recipe, changes: Mapping[str, Any]) -> CellResult:
    """Read the result of a finished run folder.

    Args:
        folder: The run folder.
        cells: The cells that the run provides figures for.
        recipe: The recipe of the run.
        changes: Fields that differ from the cells' recipe.
    """
    records, summary = read_rounds(folder), finished(folder)
    assert summary is not None
    curves = curves_of(records)
    rounds = {cell.column.round for cell in cells if cell.column.round} - {len(records)}
    figures = {name: summarise([v for _, v in curve], recipe.evaluation.summary) for name, curve in curves.items()}
    for name, curve in curves.items():
        for at in sorted(rounds):
            if known := [value for round, value in curve if round <= at]:
                figures[f"{name}@{at}"] = summarise(known, recipe.evaluation.summary)
    shown = {cell.measure.removesuffix(BEST) for cell in cells}
    peaks = best_of(curves) if any(cell.measure.endswith(BEST) for cell in cells) else {}
    figures |= {name + BEST: value for name, (_, value) in peaks.items()}
    return CellResult(
        of=cells[0].key,
        seed=recipe.seed,
        rounds=len(records),
        figures={name: round(value, 5) for name, value in sorted(figures.items())},
        changes=dict(changes),
        curve={name: thinned(curve) for name, curve in sorted(curves.items()) if name in {*shown, *CURVES}},
        best={name + BEST: at for name, (at, _) in sorted(peaks.items())},
        costs=costs_of(records),
        seconds=round(summary["seconds"], 1),
        beside=int(os.environ.get(BESIDE, 1)),
        machine=_read_machines(folder) or machine(recipe),
        engine=recipe.engine.model_dump(mode="json", exclude_defaults=True),
        versions=versions(),
        commit=commit(),
        code=_read_code(folder),
        recipe=cells[0].changed(changes),
    )


def curves_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return each stored metric over the evaluated rounds; metrics per style are named like `styles.mnist`."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in _metrics(record):
            curves.setdefault(name, []).append((record["round"], value))
    return curves


def best_of(curves: Mapping[str, list[tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    """Return the first round with the highest value of each accuracy, and the value."""
    return {
        name: max(curve, key=lambda point: (point[1], -point[0]))
        for name, curve in curves.items()
        if name.endswith(("_accuracy", "_weighted"))
    }


def costs_of(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return what a round costs: bytes of a client's messages, seconds, and GPU memory if there is a GPU."""
    found = {
        "up_bytes": mean(record["up_bytes"] for record in records),
        "down_bytes": mean(record["down_bytes"] for record in records),
        "train_seconds": round(median(record["train_seconds"] for record in records), 4),
        "round_seconds": round(median(record["seconds"] for record in records), 4),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_bytes"] = torch.cuda.max_memory_reserved()
    return found


def reset_gpu_memory() -> None:
    """Begin to measure the peak of the GPU memory that this process reserves."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _metrics(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and name.endswith("styles"):
            yield from ((f"{name}.{style}", share) for style, share in value.items())
        elif isinstance(value, float) and name.endswith(STORED):
            yield name, value


def thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Thin a curve to at most `CURVE_POINTS` points, including the first and the last."""
    kept = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), CURVE_POINTS)).round().astype(int))
    return [(curve[i][0], round(curve[i][1], 4)) for i in kept]


def machine(recipe: Recipe) -> str:
    """Describe the hardware that a recipe runs on here."""
    if torch.cuda.is_available() and recipe.engine.device != "cpu" and engine_class(recipe.engine).gpu:
        return torch.cuda.get_device_name()
    return processors()


def note_machine(folder: Path, recipe: Recipe) -> None:
    """Add this machine to the list of machines in a run folder."""
    known = _read_machines(folder)
    if machine(recipe) not in known:
        write_whole(folder / MACHINES, ", then ".join(filter(None, [known, machine(recipe)])).encode())


def note_code(folder: Path, found: Mapping[str, str]) -> None:
    """Store the fingerprint of the code that began a run; a resumed run, which may have other code, keeps it."""
    write_json(folder / CODE, found)


def _read_code(folder: Path) -> dict[str, str]:
    path = folder / CODE
    return read_json(path, dict[str, str], "remove it") if path.exists() else {}


def _read_machines(folder: Path) -> str:
    path = folder / MACHINES
    return path.read_text(encoding="utf-8") if path.exists() else ""


def commit() -> str | None:
    """Return the git commit of this code, with `+` if files have changed since; None outside a repository."""
    here = Path(__file__).parent
    try:
        asked = [["git", "rev-parse", "--short=10", "HEAD"], ["git", "status", "--porcelain", "-uno", "."]]
        head, changed = (subprocess.run(a, cwd=here, capture_output=True, text=True, check=True).stdout for a in asked)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")
