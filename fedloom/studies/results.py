"""Stored results: one small JSON file per run with its figures, a thinned curve, the machine and the time."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config.recipe import Recipe
from fedloom.core.reading import read_json
from fedloom.engines import engine_class
from fedloom.experiment.files import write_whole
from fedloom.experiment.run_folder import finished, read_rounds, versions
from fedloom.experiment.summary import summarise
from fedloom.studies.table import Cell

RESULTS = Path("docs") / "reproduction"
BESIDE = "FEDLOOM_BESIDE"
"""Environment variable with the number of runs that share the machine, including the run that reads it."""
MACHINES = "machines.txt"
CURVE_POINTS = 40
PATTERN = ("_accuracy", "_std", "_weighted", "_worst", "distance")
"""Endings of the names of the metrics that are stored."""


@dataclass(frozen=True)
class CellResult:
    """Result of a finished run of a cell's recipe, possibly with `changes`."""

    of: str
    """Key of the cell's recipe."""
    seed: int
    rounds: int
    figures: dict[str, float]
    """Figures by `measure` or `measure@round`, as fractions."""
    changes: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: float = 0.0
    beside: int = 1
    """Number of runs that shared the machine, including this one."""
    machine: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    def figure(self, cell: Cell) -> float | None:
        """Return the figure of a cell in percent (a distance unscaled); None if it was not measured."""
        name = cell.measure if cell.column.round in (None, self.rounds) else f"{cell.measure}@{cell.column.round}"
        share = self.figures.get(name)
        return None if share is None else share * (1 if cell.measure == "distance" else 100)


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
    shown = {cell.measure for cell in cells}
    return CellResult(
        of=cells[0].key,
        seed=recipe.seed,
        rounds=len(records),
        figures={name: round(value, 5) for name, value in sorted(figures.items())},
        changes=dict(changes),
        curve={name: thinned(curve) for name, curve in sorted(curves.items()) if name in shown},
        seconds=round(summary["seconds"], 1),
        beside=int(os.environ.get(BESIDE, 1)),
        machine=_read_machines(folder) or machine(recipe),
        engine=recipe.engine.model_dump(mode="json", exclude_defaults=True),
        versions=versions(),
        commit=commit(),
        recipe=cells[0].changed(changes),
    )


def curves_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return each stored metric over the evaluated rounds; metrics per style are named like `styles.mnist`."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in _metrics(record):
            curves.setdefault(name, []).append((record["round"], value))
    return curves


def _metrics(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and name.endswith("styles"):
            yield from ((f"{name}.{style}", share) for style, share in value.items())
        elif isinstance(value, float) and name.endswith(PATTERN):
            yield name, value


def thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Thin a curve to at most `CURVE_POINTS` points, including the first and the last."""
    kept = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), CURVE_POINTS)).round().astype(int))
    return [(curve[i][0], round(curve[i][1], 4)) for i in kept]


def machine(recipe: Recipe) -> str:
    """Describe the hardware that a recipe runs on here."""
    if torch.cuda.is_available() and recipe.engine.device != "cpu" and engine_class(recipe.engine).gpu:
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def note_machine(folder: Path, recipe: Recipe) -> None:
    """Add this machine to the list of machines in a run folder."""
    known = _read_machines(folder)
    if machine(recipe) not in known:
        write_whole(folder / MACHINES, ", then ".join(filter(None, [known, machine(recipe)])).encode())


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


def store(result: CellResult, path: Path) -> None:
    """Write a result; an earlier result of the same run is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in asdict(result).items() if value not in ({}, None, "")}
    curves = values.pop("curve", {})
    lines = ",\n".join(f'  "{name}": {json.dumps(curve)}' for name, curve in curves.items())
    text = json.dumps(values, indent=1, ensure_ascii=False)[:-2]
    write_whole(path, (text + (f',\n "curve": {{\n{lines}\n }}' if lines else "") + "\n}\n").encode())


def stored(folder: Path, paper: str) -> list[CellResult]:
    """Return all stored results of a paper."""
    return [read(path) for path in sorted((folder / paper).glob("*.json"))]


def read(path: Path) -> CellResult:
    """Read one stored result."""
    return read_json(path, CellResult, "remove it and repeat the run")
