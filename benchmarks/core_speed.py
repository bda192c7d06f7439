"""Speed of one CPU core with each network of the papers' tables: `python -m benchmarks.core_speed`.

Counts CPU time, not elapsed time, so that other work on the machine matters little.
"""

import tempfile
import time

import torch

from fedloom.config.recipe import Recipe
from fedloom.experiment.loop import Experiment
from fedloom.studies.cost import made_up
from fedloom.studies.table import Cell, cells_of, load_table, table_names
from fedloom.studies.workload import cost_of

ENOUGH = 6.0
"""Seconds that a measurement takes at least, if there are enough images."""
MOST = 4096
"""Largest number of images of a measurement."""


def main() -> None:
    torch.set_num_threads(1)
    cells: dict[tuple[str, int | None], Cell] = {}
    for cell in (cell for name in table_names() for cell in cells_of(name, load_table(name))):
        cost = cost_of(cell.values)
        cells.setdefault((cost.network, cost.size), cell)
    for kind, cell in cells.items():
        print(f"    {kind}: {speed(cell.recipe()):.0f},", flush=True)


def speed(recipe: Recipe) -> float:
    """Return the images forward and backward per second of CPU time, in batches of at most 64."""
    images = 16
    while True:
        seconds = _seconds(recipe, images)
        if seconds > ENOUGH or images >= MOST:
            return images / seconds
        images *= 4 if seconds < ENOUGH / 4 else 2


def _seconds(recipe: Recipe, images: int) -> float:
    task = made_up(recipe, clients=1, each=images, classes=10)
    with tempfile.TemporaryDirectory(prefix="fedloom-core-") as folder:
        short = Recipe.parse(
            {
                "method": "fedavg",
                "model": recipe.model.model_dump(),
                "training": {"rounds": 1, "batch_size": min(recipe.training.batch_size, 64)},
                "evaluation": {"every": 10**6, "clients": 1},
                "storage": {"personal_models": False},
                "engine": "inline",
                "out": f"{folder}/run",
            }
        )
        experiment = Experiment(short, task=task)
        began = time.process_time()
        experiment.run()
        return time.process_time() - began


if __name__ == "__main__":
    main()
