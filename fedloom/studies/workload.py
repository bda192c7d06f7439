"""Cost of a run without training anything: image-steps from a stored file, and seconds from the speed of stored runs.

Counting the passes of a recipe (`fedloom.studies.cost`) takes an update of its method. `costs.json` has the counts of
all cells of the papers' tables; `make costs` writes it. A recipe that is not in it is counted.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.studies.results import CellResult, processors
from fedloom.studies.table import BOARDS, PAPERS, Cell, cells_of, load_table, recipe_key, table_names

FILE = Path(__file__).with_name("costs.json")
GPUS = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg")
"""Device files of GPUs in Linux: NVIDIA, AMD, and Windows' subsystem for Linux."""
DIGITS = 10
"""Significant digits of the stored counts."""

Workload = tuple[str, str, int | None]
"""A machine, a network, and the size to which images are resized."""


@dataclass(frozen=True)
class Cost:
    """What a run trains."""

    per_round: float
    """Forward and backward passes of images in a round, without evaluation."""
    rounds: int
    network: str
    size: int | None
    """The size to which images are resized."""

    @property
    def steps(self) -> float:
        """Forward and backward passes of images in the run."""
        return self.per_round * self.rounds

    def seconds(self, known: Mapping[Workload, float], machine: str) -> float | None:
        """Estimate the seconds of the run on a machine; None if its speed is unknown."""
        speed = known.get((machine, self.network, self.size))
        return self.steps / speed if speed else None


def cost_of(values: Mapping[str, Any]) -> Cost:
    """Return the cost of a recipe's values: stored, or counted if the recipe is not stored."""
    rounds = values.get("training", {}).get("rounds")
    stored = None if rounds is None else _stored().get(_key(values))
    if stored is None:
        return _counted(values)
    per_round, network, size = stored
    return Cost(per_round, int(rounds), network, size)


def speeds(results: Iterable[CellResult], shared: bool = False) -> dict[Workload, float]:
    """Return image-steps per second for each workload: the median of stored runs that had the machine to themselves.

    Args:
        results: Stored runs.
        shared: Also use runs that shared the machine, multiplied by the number of concurrent runs. The speeds are then
            those of a machine that is kept busy with several runs.
    """
    found: dict[Workload, list[float]] = {}
    for result in results:
        if result.seconds and (shared or result.beside == 1):
            cost = cost_of(result.recipe)
            speed = cost.steps * result.beside / result.seconds
            found.setdefault((result.machine, cost.network, cost.size), []).append(speed)
    return {key: median(values) for key, values in found.items()}


def duration_in_words(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3.5 h`, `21 days`."""
    for unit, length in (("days", 172_800), ("h", 7_200), ("min", 120)):
        if seconds >= length:
            return f"{seconds / (length / 2):.{int(unit == 'h')}f} {unit}"
    return f"{seconds:.0f} s"


def build(cells: Iterable[Cell]) -> dict[str, list[Any]]:
    """Count the passes of these cells, in the paper's setting and in the table's reduced setting."""
    found: dict[str, list[Any]] = {}
    for cell in cells:
        for changes in ({}, load_table(cell.table).reduced):
            values = cell.changed(changes)
            if (key := _key(values)) not in found:
                cost = _counted(values)
                found[key] = [float(f"{cost.per_round:.{DIGITS}g}"), cost.network, cost.size]
    return dict(sorted(found.items()))


def every_cell() -> list[Cell]:
    """Return the cells of all tables and boards."""
    return [cell for name in table_names((*PAPERS, *BOARDS)) for cell in cells_of(name, load_table(name))]


def _key(values: Mapping[str, Any]) -> str:
    """Return the key of a recipe without the number of rounds, which the cost of a round does not depend on."""
    training = {name: value for name, value in values.get("training", {}).items() if name not in ("rounds", "schedule")}
    return recipe_key({**values, "training": training})


def _counted(values: Mapping[str, Any]) -> Cost:
    from fedloom.config.recipe import Recipe
    from fedloom.studies.cost import image_steps

    recipe = Recipe.parse(dict(values))
    rounds = recipe.training.rounds
    return Cost(image_steps(recipe) / rounds, rounds, recipe.model.name, recipe.data.size)


def this_machine(values: Mapping[str, Any]) -> str:
    """Describe the hardware that a recipe runs on here. torch, which names a GPU, is imported only if there is one."""
    if sys.platform == "linux" and not any(glob(pattern) for pattern in GPUS):
        return processors()
    from fedloom.config.recipe import Recipe
    from fedloom.studies.outcome import machine

    return machine(Recipe.parse(dict(values)))


@cache
def _stored() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


if __name__ == "__main__":
    lines = [f" {json.dumps(key)}: {json.dumps(cost)}" for key, cost in build(every_cell()).items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"written: {FILE.relative_to(FILE.parents[2])}")
