"""A run's log file, and the services that its rounds are also written to: TensorBoard, Weights & Biases."""

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
"""What the engine has chosen; shown by the command line."""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Warnings go to this file (made at the first of them) and to stderr, or where the user has logging go."""
    to_file = logging.FileHandler(path, delay=True, encoding="utf-8")
    to_file.setLevel(logging.WARNING)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if not LOGGER.hasHandlers():
        assert logging.lastResort is not None
        handlers.append(logging.lastResort)  # asks for sys.stderr each time: a progress bar may have taken its place
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
        to_file.close()


class TensorBoard:
    """Event files in the run folder: tensorboard --logdir runs"""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, recipe: Recipe, folder: Path):
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def write(self, round: int, numbers: dict[str, float]) -> None:
        """Scalars; rounds that a resumed run does again are taken back first."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=round)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases; project, entity and mode as WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE say."""

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
                f"log = 'wandb': {error}; with WANDB_MODE=offline it writes into the run folder only"
            ) from error
        self._run.define_metric("*", step_metric="round")  # rounds that are done again have the same place

    def write(self, round: int, numbers: dict[str, float]) -> None:
        """One line of the history."""
        self._run.log({"round": round} | numbers)

    def close(self) -> None:
        """Ends the run there, which uploads what is left."""
        self._run.finish()


WRITERS: dict[str, type[TensorBoard | Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Writers:
    """All that a recipe asks for; called with each round's record."""

    def __init__(self, recipe: Recipe, folder: Path):
        self._writers = [WRITERS[name](recipe, folder) for name in recipe.log]

    def __call__(self, record: RoundRecord) -> None:
        """Numbers of the record, lists and notes left out."""
        plain = {n: float(v) for n, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for writer in self._writers:
            writer.write(record["round"], {name: value for name, value in plain.items() if name != "round"})

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def refuse_missing(names: Iterable[str]) -> None:
    """A log whose package is not there is found before a run begins."""
    for name in names:
        if find_spec(WRITERS[name].package) is None:
            raise UserError(f"log = '{name}': it is not installed; get it with: pip install 'fedloom[{name}]'")
