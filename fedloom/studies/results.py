"""Stored results: one small JSON file per run with its figures, a thinned curve, the machine and the time."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedloom.core.reading import read_json
from fedloom.experiment.files import write_whole
from fedloom.studies.table import SUFFIX, Cell

SHIPPED = Path(__file__).with_name("stored")
"""Results that are part of the package, with a folder for each paper."""
ELSEWHERE = Path("reproduction")
"""Folder of new results outside a checkout of the repository."""
BESIDE = "FEDLOOM_BESIDE"
"""Environment variable with the number of runs that share the machine, including the run that reads it."""


@dataclass(frozen=True)
class CellResult:
    """Result of a finished run of a cell's recipe, possibly with `changes`."""

    of: str
    """Key of the cell's recipe."""
    seed: int
    rounds: int
    figures: dict[str, float]
    """Figures by `measure`, `measure@round` or `measure@best`; accuracies are fractions."""
    changes: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    best: dict[str, int] = field(default_factory=dict)
    """The round of each figure `measure@best`."""
    costs: dict[str, float] = field(default_factory=dict)
    """Means per client and round (`up_bytes`, `down_bytes`), medians per round (`train_seconds`, `round_seconds`), and
    the peak of the GPU memory that the run's process reserved (`gpu_bytes`)."""
    seconds: float = 0.0
    beside: int = 1
    """Number of runs that shared the machine, including this one."""
    machine: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    code: dict[str, str] = field(default_factory=dict)
    """Fingerprint of the code, see `studies.code`; empty if the version that stored the result had none."""
    recipe: dict[str, Any] = field(default_factory=dict)

    def figure(self, cell: Cell) -> float | None:
        """Return the figure of a cell in percent (a distance unscaled); None if it was not measured."""
        name = cell.measure if cell.column.round in (None, self.rounds) else f"{cell.measure}@{cell.column.round}"
        share = self.figures.get(name)
        return None if share is None else share * (1 if cell.measure == "distance" else 100)


def processors() -> str:
    """Describe this machine's processors, as results of runs on them do."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def store(result: CellResult, path: Path) -> None:
    """Write a result; an earlier result of the same run is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in asdict(result).items() if value not in ({}, None, "")}
    curves = values.pop("curve", {})
    lines = ",\n".join(f'  "{name}": {json.dumps(curve)}' for name, curve in curves.items())
    text = json.dumps(values, indent=1, ensure_ascii=False)[:-2]
    write_whole(path, (text + (f',\n "curve": {{\n{lines}\n }}' if lines else "") + "\n}\n").encode())


def default_folder(tables: Sequence[str] = ()) -> Path:
    """Return the folder of new results: the package's in a checkout that can be written, else `reproduction`.

    Results of boards of one's own, which are files, never go into the package.
    """
    is_checkout = (SHIPPED.parents[2] / ".git").exists() and os.access(SHIPPED, os.W_OK)
    is_own = any(table.endswith(SUFFIX) for table in tables)
    return SHIPPED if is_checkout and not is_own else ELSEWHERE


def stored(folder: Path, paper: str) -> list[CellResult]:
    """Return all results of a paper: those of the package, replaced and extended by those of a folder."""
    found = {path.name: path for base in (SHIPPED, folder) for path in (base / paper).glob("*.json")}
    return [read(path) for _, path in sorted(found.items())]


def find(path: Path) -> Path | None:
    """Return the file of a result, in the folder of new results or in the package; None if it is not stored."""
    shipped = SHIPPED / path.parent.name / path.name
    return path if path.exists() else shipped if shipped.exists() else None


def read(path: Path) -> CellResult:
    """Read one stored result."""
    return read_json(path, CellResult, "remove it and repeat the run")
