"""A run's log file, and additional loggers for the records of rounds: TensorBoard, Weights & Biases."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.experiment.records import RoundRecord

LOGGER = logging.getLogger("fedloom")
HINTS = logging.getLogger("fedloom.engines")
"""Logger for choices of the engine and remarks about the network, which the command line displays."""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write warnings to a file, which is created at the first warning, and to stderr or the user's log handlers."""
    to_file = logging.FileHandler(path, delay=True, encoding="utf-8")
    to_file.setLevel(logging.WARNING)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if not LOGGER.hasHandlers():
        assert logging.lastResort is not None
        handlers.append(logging.lastResort)  # looks up sys.stderr at each record: a progress bar may have replaced it
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
        to_file.close()


class TensorBoard:
    """TensorBoard event files in the run folder; view them with `tensorboard --logdir runs`."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, recipe: Recipe, folder: Path):
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def write(self, round: int, numbers: dict[str, float]) -> None:
        """Write a round's scalars; the first write of a resumed run removes rounds that will be repeated."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=round)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A Weights & Biases run, configured by WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE."""

    package: ClassVar[str] = "wandb"

    def __init__(self, recipe: Recipe, folder: Path):
        import wandb

        id_file = folder / "wandb.txt"
        if not id_file.exists():
            id_file.write_text(token_hex(4), encoding="utf-8")
        identity = id_file.read_text(encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                id=identity, resume="allow", dir=str(folder), name=folder.name, config=recipe.resolved()
            )
        except wandb.Error as error:
            raise UserError(
                f"log = 'wandb': {error}; set WANDB_MODE=offline to write to the run folder only"
            ) from error
        self._run.define_metric("*", step_metric="round")  # rounds that a resumed run repeats keep their x position

    def write(self, round: int, numbers: dict[str, float]) -> None:
        """Write a round's numbers as one line of the history."""
        self._run.log({"round": round} | numbers)

    def close(self) -> None:
        """Finish the W&B run, which uploads remaining data."""
        self._run.finish()


WRITERS: dict[str, type[TensorBoard | Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}
"""Additional loggers by their name in the recipe field `log`."""


class Writers:
    """The additional loggers of a recipe, called with each round's record."""

    def __init__(self, recipe: Recipe, folder: Path):
        self._writers = [WRITERS[name](recipe, folder) for name in recipe.log]

    def __call__(self, record: RoundRecord) -> None:
        """Write the numbers of the record; other values are skipped."""
        plain = {n: float(v) for n, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for writer in self._writers:
            writer.write(record["round"], {name: value for name, value in plain.items() if name != "round"})

    def close(self) -> None:
        """Close all loggers."""
        for writer in self._writers:
            writer.close()


def refuse_missing(names: Iterable[str]) -> None:
    """Raise a UserError if the package of a logger is not installed, before the run starts."""
    for name in names:
        if find_spec(WRITERS[name].package) is None:
            raise UserError(f"log = '{name}': is not installed; install it with: pip install 'fedloom[{name}]'")
