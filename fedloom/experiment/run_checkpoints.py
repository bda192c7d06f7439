"""The checkpoints of one run: what they contain, when they are written, and how a resumed run restores them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter

import torch

from fedloom.config.recipe import Recipe
from fedloom.core.server import Server
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.experiment.checkpoint import FOLDER, Checkpoints
from fedloom.experiment.client_store import ClientStore
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.resume import checked_notes, fingerprint, refuse_other_data, reopen, warn_of_other_versions
from fedloom.experiment.run_folder import RunFolder
from fedloom.experiment.selection import BestState
from fedloom.trust.ledger import Ledger
from fedloom.trust.ledger_file import FILE as LEDGER


class RunCheckpoints:
    """Saves and restores the state of a run.

    Args:
        recipe: The recipe.
        task: The problem, whose data must be the same when the run is resumed.
        folder: The run folder.
        server: The server.
        stores: What the clients and the server remember of each client, by name.
        best: The copy of the best round's state.
    """

    def __init__(
        self, recipe: Recipe, task: Task, folder: RunFolder, server: Server, stores: Mapping[str, ClientStore],
        best: BestState,
    ):  # fmt: skip
        self._recipe, self._task, self._folder, self._server, self._best = recipe, task, folder, server, best
        self._stores = {**stores, **best.stores}
        self._files = Checkpoints(folder.path / FOLDER)
        self._start = perf_counter()
        self.due = CheckpointSchedule(recipe.storage.checkpoint_every, recipe.storage.checkpoint_seconds)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the data."""
        return fingerprint(self._task)

    @property
    def seconds(self) -> float:
        """Duration of the run so far, including the time before a resume."""
        return perf_counter() - self._start

    def save(self, history: list[RoundRecord], ledger: Ledger) -> None:
        """Write a checkpoint after the last round of the history, and the ledger.

        Raises:
            UserError: They cannot be written, or another process has taken the run folder over.
        """
        self._folder.refuse_if_lost()
        notes = {
            "task": self.fingerprint, "seconds": self.seconds, "history": history, "ledger": ledger.to_json()
        }  # fmt: skip
        with self.due.writing():
            server = self._server.saved() | self._best.saved()
            self._files.save(len(history), server, self._stores, notes)
        self._folder.write_json(LEDGER, ledger.to_json())

    def restore(self, setup: Setup, device: torch.device) -> tuple[list[RoundRecord], Ledger]:
        """Restore the state of the last checkpoint; metrics of later rounds are dropped.

        Returns:
            The records of the rounds so far, and the ledger.
        """
        rounds = self._recipe.training.rounds
        checkpoint, server = self._files.load(self._stores, device, setup.shapes_of, before=rounds)
        warn_of_other_versions(self._folder.path)
        notes = checked_notes(checkpoint, self._folder.path)
        refuse_other_data(self._task, self.fingerprint, notes["task"])
        self._server.restore(server)
        self._best.load(server)
        ledger = Ledger.from_json(notes["ledger"])
        self._start -= notes["seconds"]
        reopen(self._folder.path, rounds)
        self._folder.cut_back(notes["history"])
        return notes["history"], ledger

    def finish(self, *, keep_last: bool) -> None:
        """Remove all checkpoints, or all but the newest."""
        if keep_last:
            self._files.keep_last()
        else:
            self._files.remove()


SHARE = 20
"""Checkpoints that are due by elapsed time take at most 1/`SHARE` of the run time."""


class CheckpointSchedule:
    """Decides after which rounds a checkpoint is due.

    Args:
        rounds: Rounds between checkpoints; 0: never.
        seconds: A checkpoint is also due when the last one is this old; 0: no limit.
    """

    def __init__(self, rounds: int, seconds: float):
        self._rounds, self._seconds = rounds, seconds
        self._since, self._took = perf_counter(), 0.0

    def __call__(self, round: int) -> bool:
        """Return whether a checkpoint is due after this round."""
        if not self._rounds:
            return False
        late = perf_counter() - self._since >= max(self._seconds, SHARE * self._took)
        return round % self._rounds == 0 or (late and self._seconds > 0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context manager that measures how long writing a checkpoint takes."""
        start = perf_counter()
        yield
        self._since = perf_counter()
        self._took = self._since - start
