"""Checks before a run is resumed: the recipe and the data must be the same, other versions give a warning."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.config.loading import flat, is_free
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.reading import CHECKED, conforming, read_json
from fedloom.core.task import Task
from fedloom.engines import EngineSettings, engine_class
from fedloom.experiment.checkpoint import FOLDER as CHECKPOINTS
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.files import write_whole
from fedloom.experiment.records import ROUND, RoundRecord, Summary
from fedloom.experiment.run_folder import (
    ENGINE,
    RECIPE,
    SUMMARY,
    finished,
    holds_run,
    read_rounds,
    stored_values,
    stored_versions,
    versions,
)
from fedloom.experiment.selection import EarlyStopping
from fedloom.trust.ledger_file import LedgerFile

EXTENDED = ("training.rounds",)
"""Fields that `fedloom resume` may change although they affect results."""
log = logging.getLogger("fedloom")


def finished_summary(recipe: Recipe, *, warn: bool = True, extend: bool = False) -> Summary | None:
    """Return the summary of the run in `recipe.out` if it is finished, else None.

    Args:
        recipe: The recipe, with the run folder in `out`.
        warn: Log a warning if the run is finished.
        extend: Accept another number of rounds than the run was started with. A run that has finished fewer rounds is
            not finished then.

    Raises:
        UserError: The folder holds a run of another recipe, or one whose number of rounds cannot be changed.
    """
    folder, rounds = recipe.out, recipe.training.rounds
    if folder is None or not holds_run(folder):
        return None
    stored, summary = Recipe.parse(stored_values(folder)), finished(folder)
    if rounds != stored.training.rounds:
        _refuse_other_rounds(stored, summary, rounds, folder)
        if extend:
            stored = stored.with_(**{"training.rounds": rounds})
    refuse_differences(recipe.resolved(), stored.resolved(), folder)
    if summary is None:
        return None
    ended = "stopped" in summary or _stopped_early(stored, folder)
    if summary["rounds"] < rounds and not ended:  # the process was killed in `reopen`
        return None
    if warn:
        log.warning("the run in '%s' is finished: there is nothing to resume", folder)
    return summary


def _stopped_early(stored: Recipe, folder: Path) -> bool:
    """Whether a finished run ended because of `training.patience`, as every run with more rounds would."""
    patience, evaluation = stored.training.patience, stored.evaluation
    if patience is None:
        return False
    history = read_rounds(folder)
    if len(history) % evaluation.every:  # the last round is always evaluated; with more rounds it would not have been
        history = history[:-1]
    return EarlyStopping(patience, evaluation.measure).due(history)


def _refuse_other_rounds(stored: Recipe, summary: Summary | None, rounds: int, folder: Path) -> None:
    """Raise a UserError if a run cannot be continued to this number of rounds."""
    wrong, training = f"training.rounds = {rounds}: ", stored.training
    new_run = f"start a new run: `fedloom run {folder / RECIPE} --rounds {rounds} --out ANOTHER`"
    if training.needs_total:
        raise UserError(
            f"{wrong}'{folder}' was started with {training.rounds} rounds and training.schedule = "
            f"'{training.schedule}', whose learning rates depend on the number of rounds; {new_run}"
        )
    if summary is not None and rounds < summary["rounds"]:
        raise UserError(f"{wrong}'{folder}' has finished {summary['rounds']} rounds; choose more, or {new_run}")
    if summary is not None and _stopped_early(stored, folder):
        raise UserError(
            f"{wrong}'{folder}' stopped after round {summary['rounds']} because of training.patience = "
            f"{training.patience}, and would stop there with more rounds, too; to train longer, start a new run with a "
            f"larger training.patience and --out ANOTHER"
        )
    if summary is not None and "stopped" in summary:
        raise UserError(f"{wrong}a callback stopped '{folder}' after round {summary['rounds']}; {new_run}")
    if summary is not None and not any((folder / CHECKPOINTS).glob("round-*.json")):
        raise UserError(
            f"{wrong}'{folder}' is finished and has no checkpoint to continue from (storage.final_checkpoint is false, "
            f"or another version of fedloom finished it); {new_run}"
        )


def reopen(folder: Path, rounds: int) -> None:
    """Store the number of rounds in the recipe of a run, and remove its summary: the run is then unfinished."""
    stored = Recipe.parse(stored_values(folder))
    if stored.training.rounds != rounds:
        write_whole(folder / RECIPE, stored.with_(**{"training.rounds": rounds}).to_yaml().encode())
    (folder / SUMMARY).unlink(missing_ok=True)


def refuse_differences(given: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise a UserError if given and stored values differ in a field that affects results."""
    mine, theirs = dict(flat(given)), dict(flat(stored))
    for name in dict.fromkeys([*mine, *theirs]):
        if not is_free(name) and mine.get(name) != theirs.get(name):
            raise UserError(
                f"{name} = {mine.get(name)!r}: '{folder}' was started with {theirs.get(name)!r}, which cannot be "
                "changed on resume; use the original recipe, or another --out"
                + (f"; to change it: `fedloom resume {folder} --rounds {mine[name]}`" if name in EXTENDED else "")
            )


def warn_of_other_versions(folder: Path) -> None:
    """Log a warning for each package or file whose version differs from the one that the run was started with."""
    stored, now = stored_versions(folder), versions()
    for name in now:
        if name in stored and stored[name] != now[name]:
            log.warning(
                "the version of %s is %s, but '%s' was started with %s: results may differ",
                name, now[name], folder, stored[name],
            )  # fmt: skip


@with_config(CHECKED)
class RunNotes(TypedDict):
    """The state in a checkpoint besides tensors."""

    task: str
    seconds: Annotated[float, Field(ge=0)]
    history: list[RoundRecord]
    ledger: LedgerFile


@with_config(CHECKED)
class EngineChoice(TypedDict):
    """The contents of engine.json: settings that the engine chose automatically."""

    name: str
    workers: Annotated[int, Field(ge=1, le=1024)]
    cohort: Annotated[int, Field(ge=1, le=1024)]


def with_choice(settings: EngineSettings, folder: Path) -> EngineSettings:
    """Return the engine settings of a resumed run.

    If the recipe sets neither workers nor cohort, they are the values that the same engine chose before.
    """
    if not (folder / ENGINE).exists() or settings.workers is not None or settings.cohort is not None:
        return settings
    chosen = read_json(folder / ENGINE, EngineChoice, f"remove {ENGINE}: the engine then chooses again")
    if chosen["name"] != engine_class(settings).name:
        return settings
    return settings.model_copy(update={"workers": chosen["workers"], "cohort": chosen["cohort"]})


def checked_notes(checkpoint: Checkpoint, folder: Path) -> RunNotes:
    """Return a checkpoint's notes, checked.

    Raises:
        UserError: The notes are invalid, or their history does not end at the checkpoint's round.
    """
    remedy = "start a new run"
    notes = conforming(checkpoint.notes, RunNotes, f"'{folder}': the checkpoint", remedy)
    for number, record in enumerate(notes["history"], 1):
        if record["round"] != number or any(name not in record for name in ROUND):
            raise UserError(
                f"'{folder}': the checkpoint cannot be used: round {number} is missing in its history; {remedy}"
            )
    if len(notes["history"]) != checkpoint.round:
        raise UserError(
            f"'{folder}': the checkpoint cannot be used: it was written after round {checkpoint.round}, but its "
            f"history has {len(notes['history'])} rounds; {remedy}"
        )
    return notes


def refuse_other_data(task: Task, found: str, expected: str) -> None:
    """Raise a UserError if the fingerprint of the data differs from the one that the run was started with."""
    if found != expected:
        raise UserError(
            f"data.name = '{task.dataset.name}': the data differ from those that the run was started with; nothing was "
            "changed. Name the folder of the original data (--set data.dir=…), or start a new run"
        )


def fingerprint(task: Task) -> str:
    """Return a hash of the labels, the division among clients and up to a thousand images.

    In a deployment, clients' data may grow between rounds: the hash covers only shape, classes and newcomers.
    """
    images = task.dataset.inputs
    shape = task.shape if task.elsewhere else tuple(images.shape)
    digest = hashlib.sha256(repr((shape, task.dataset.classes, task.federation.newcomers)).encode())
    if task.elsewhere:
        return digest.hexdigest()
    federation = task.federation
    distinct = {id(samples): samples for samples in (*federation.train, *federation.test)}
    if federation.validates:
        distinct |= {id(samples): samples for samples in federation.validation}
    some = images[:: max(1, len(images) // 1000)]
    for array in (task.dataset.labels.numpy(), some.numpy(), *distinct.values()):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
