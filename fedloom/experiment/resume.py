"""Whether a run folder may be continued: the same recipe, the same data; and what else should be known."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, with_config
from typing_extensions import TypedDict

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.reading import CHECKED, conforming, read_json
from fedloom.core.task import Task
from fedloom.engines import EngineSettings, engine_class
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.records import ROUND, RoundRecord, Summary
from fedloom.experiment.run_folder import ENGINE, finished, holds_run, stored_values, stored_versions, versions
from fedloom.trust.ledger import LedgerFile

FREE = ("engine", "storage", "out", "log", "data.dir", "sweep.parallel")
"""Where and how fast a run goes on may change; what it computes may not."""
log = logging.getLogger("fedloom")


def finished_summary(recipe: Recipe, *, warn: bool = True) -> Summary | None:
    """The summary of the run in `recipe.out`, if it is finished; a run of another recipe is refused."""
    folder = recipe.out
    if folder is None or not holds_run(folder):
        return None
    refuse_differences(recipe.resolved(), Recipe.parse(stored_values(folder)).resolved(), folder)
    summary = finished(folder)
    if summary is not None and warn:
        log.warning("the run in '%s' is finished: there is nothing to resume", folder)
    return summary


def refuse_differences(given: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """What a folder goes on with must be what it was begun with, but for what is free."""
    mine, theirs = dict(flat(given)), dict(flat(stored))
    for name in dict.fromkeys([*mine, *theirs]):
        if not is_free(name) and mine.get(name) != theirs.get(name):
            raise UserError(
                f"{name} = {mine.get(name)!r}: what was begun in '{folder}' has {theirs.get(name)!r}, and only goes on "
                "with that; give the recipe that it was begun with, or another --out"
            )


def tell_other_versions(folder: Path) -> None:
    """A run that goes on with other versions of what computes it may give other numbers."""
    began, now = stored_versions(folder), versions()
    for name in now:
        if name in began and began[name] != now[name]:
            log.warning(
                "%s is %s here; '%s' was begun with %s: numbers may differ", name, now[name], folder, began[name]
            )


@with_config(CHECKED)
class RunNotes(TypedDict):
    """What a checkpoint says besides tensors."""

    task: str
    seconds: Annotated[float, Field(ge=0)]
    history: list[RoundRecord]
    ledger: LedgerFile


@with_config(CHECKED)
class EngineChoice(TypedDict):
    """engine.json: what the engine chose itself."""

    name: str
    workers: Annotated[int, Field(ge=1, le=1024)]
    cohort: Annotated[int, Field(ge=1, le=1024)]


def with_choice(settings: EngineSettings, folder: Path) -> EngineSettings:
    """The engine settings of a resumed run: what the same engine chose before, where the recipe leaves it open."""
    if not (folder / ENGINE).exists() or settings.workers is not None or settings.cohort is not None:
        return settings
    chosen = read_json(folder / ENGINE, EngineChoice, f"remove {ENGINE}: the engine then chooses again")
    if chosen["name"] != engine_class(settings).name:
        return settings
    return settings.model_copy(update={"workers": chosen["workers"], "cohort": chosen["cohort"]})


def checked_notes(checkpoint: Checkpoint, folder: Path) -> RunNotes:
    """A checkpoint's notes, if they are a run's that has come as far as the checkpoint says."""
    remedy = "begin a new run"
    notes = conforming(checkpoint.notes, RunNotes, f"'{folder}': the checkpoint", remedy)
    for number, record in enumerate(notes["history"], 1):
        if record["round"] != number or any(name not in record for name in ROUND):
            raise UserError(
                f"'{folder}': the checkpoint cannot be used: round {number} is not in its history; {remedy}"
            )
    if len(notes["history"]) != checkpoint.round:
        raise UserError(
            f"'{folder}': the checkpoint cannot be used: it is of round {checkpoint.round}, and its history has "
            f"{len(notes['history'])} rounds; {remedy}"
        )
    return notes


def refuse_other_data(task: Task, found: str, expected: str) -> None:
    """The same clients with the same samples, by their fingerprints."""
    if found != expected:
        raise UserError(
            f"data.name = '{task.dataset.name}': these are not the data that the run was begun with; nothing was "
            "changed. Give the folder that has them (--set data.dir=…), or begin a new run"
        )


def fingerprint(task: Task) -> str:
    """Of labels, who holds what, and up to a thousand images; elsewhere, clients' data may grow between rounds."""
    images = task.dataset.images
    shape = task.shape if task.elsewhere else tuple(images.shape)
    digest = hashlib.sha256(repr((shape, task.dataset.classes, task.federation.newcomers)).encode())
    if task.elsewhere:
        return digest.hexdigest()
    federation = task.federation
    distinct = {id(samples): samples for samples in (*federation.train, *federation.test)}
    some = images[:: max(1, len(images) // 1000)]
    for array in (task.dataset.labels.numpy(), some.numpy(), *distinct.values()):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def is_free(path: str) -> bool:
    """Whether a field says where and how fast, not what."""
    return any(path == part or path.startswith(part + ".") for part in FREE)


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe's fields by path."""
    if not isinstance(values, Mapping):
        yield prefix, list(values) if isinstance(values, tuple) else values
        return
    for name, value in values.items():
        yield from flat(value, f"{prefix}.{name}".lstrip("."))
