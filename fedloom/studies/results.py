"""What was run: a small JSON file for each run, with its figures, a thinned curve, where and how long."""

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
"""Environment variable that tells a run how many share the machine with it, itself included."""
MACHINES = "machines.txt"
CURVE_POINTS = 40
PATTERN = ("_accuracy", "_std", "_weighted", "_worst", "distance")
"""Ends of the names of metrics that are kept."""


@dataclass(frozen=True)
class CellResult:
    """A finished run of a cell's recipe, or of one that differs from it by `changes`."""

    of: str
    """key of the cell's recipe"""
    seed: int
    rounds: int
    figures: dict[str, float]
    """by measure, or measure@round; shares of one"""
    changes: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: float = 0.0
    beside: int = 1
    """runs that shared the machine"""
    machine: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    def figure(self, cell: Cell) -> float | None:
        """What stands in the cell, in percent; a distance as it is."""
        name = cell.measure if cell.column.round in (None, self.rounds) else f"{cell.measure}@{cell.column.round}"
        share = self.figures.get(name)
        return None if share is None else share * (1 if cell.measure == "distance" else 100)


def result_of(folder: Path, cells: Sequence[Cell], recipe: Recipe, changes: Mapping[str, Any]) -> CellResult:
    """Reads a finished run folder; `cells` are those whose figures the run has."""
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
    """Every kept metric over the rounds that were evaluated; those of styles as `styles.mnist`."""
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
    """At most so many points, the first and the last among them."""
    kept = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), CURVE_POINTS)).round().astype(int))
    return [(curve[i][0], round(curve[i][1], 4)) for i in kept]


def machine(recipe: Recipe) -> str:
    """What a recipe runs on here, in words."""
    if torch.cuda.is_available() and recipe.engine.device != "cpu" and engine_class(recipe.engine).gpu:
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def note_machine(folder: Path, recipe: Recipe) -> None:
    """Adds this machine to those that a run folder has been on."""
    known = _read_machines(folder)
    if machine(recipe) not in known:
        write_whole(folder / MACHINES, ", then ".join(filter(None, [known, machine(recipe)])).encode())


def _read_machines(folder: Path) -> str:
    path = folder / MACHINES
    return path.read_text(encoding="utf-8") if path.exists() else ""


def commit() -> str | None:
    """The commit that this code is of, if that can be told; `+` where files were changed since."""
    here = Path(__file__).parent
    try:
        asked = [["git", "rev-parse", "--short=10", "HEAD"], ["git", "status", "--porcelain", "-uno", "."]]
        head, changed = (subprocess.run(a, cwd=here, capture_output=True, text=True, check=True).stdout for a in asked)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")


def store(result: CellResult, path: Path) -> None:
    """Writes it; an earlier result of the same run is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in asdict(result).items() if value not in ({}, None, "")}
    curves = values.pop("curve", {})
    lines = ",\n".join(f'  "{name}": {json.dumps(curve)}' for name, curve in curves.items())
    text = json.dumps(values, indent=1, ensure_ascii=False)[:-2]
    write_whole(path, (text + (f',\n "curve": {{\n{lines}\n }}' if lines else "") + "\n}\n").encode())


def stored(folder: Path, paper: str) -> list[CellResult]:
    """All results of a paper's runs."""
    return [read(path) for path in sorted((folder / paper).glob("*.json"))]


def read(path: Path) -> CellResult:
    """One of them."""
    return read_json(path, CellResult, "remove it, and the run is repeated")
