"""Series of runs in one folder, resumable as a whole: comparisons and sweeps.

A YAML file in the folder describes the runs. When a series is resumed, finished runs are not repeated, an interrupted
run continues from its last checkpoint, and the remaining runs are started.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import AfterValidator

from fedloom.config.loading import read_yaml
from fedloom.config.local_objects import local_object
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.core.task import Task
from fedloom.data import Dataset
from fedloom.data.shared import SharedDatasets, reading_of
from fedloom.experiment.build import load_dataset, make_task
from fedloom.experiment.files import write_whole
from fedloom.experiment.lock import RunLock
from fedloom.experiment.loop import Experiment
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.resume import finished_summary, refuse_differences
from fedloom.experiment.run_folder import holds_run, read_rounds
from fedloom.runs.parallel import run_parallel

log = logging.getLogger("fedloom")


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if repeated := [seed for number, seed in enumerate(seeds) if seed in seeds[:number]]:
        raise ValueError(f"{repeated[0]} is given twice; remove one of them")
    return seeds


Seeds = Annotated[tuple[int, ...], AfterValidator(_distinct)]
"""Distinct seeds: equal ones would repeat a run and count as two."""


def seed_list(seeds: Iterable[int] | None) -> list[Any] | None:
    """Return seeds that are given in Python, such as a list or a NumPy array, as plain numbers.

    Raises:
        UserError: They are not in a list.
    """
    if seeds is None:
        return None
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise UserError(f"seeds = {seeds!r}: must be a list, such as seeds=[0, 1, 2]")
    return [seed.item() if isinstance(seed, np.generic) else seed for seed in seeds]


def refuse_resume_without(out: str | Path | None) -> None:
    """Raise a UserError if a run or series is to be resumed, but its folder `out` is not given."""
    if out is None:
        raise UserError("resume: out is missing; set it to the folder to resume, or use `fedloom resume FOLDER`")


def run_series(
    description_file: Path,
    description: Mapping[str, Any],
    recipes: Sequence[Recipe],
    *,
    tasks: "Tasks | None" = None,
    resume: bool = False,
    parallel: int = 1,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    callbacks: Sequence[object] = (),
    on_end: Callable[[list[Summary]], None] | None = None,
) -> list[Summary]:
    """Run recipes and return their summaries, in the order of the recipes.

    Args:
        description_file: Path of the description, in the folder of the series.
        description: Values that the series is started with. They must agree with an existing description file.
        recipes: Recipes to run; the `out` of each is a folder inside the folder of the series.
        tasks: Tasks that are already built, and to which others are added.
        resume: Accept a folder that already has a description file.
        parallel: Number of runs at a time; if more than one, each run is a separate process.
        on_run: Called with each run's recipe; must return a function that is called with the record of every round
            (of parallel runs: with the last record, when the run has finished).
        callbacks: Callbacks of all runs; not possible with parallel runs, which are other processes.
        on_end: Called after each run with the summaries so far.

    Raises:
        UserError: The folder holds other runs, or a recipe cannot be run.
        Interrupted: A signal stopped the series; the interrupted run has a checkpoint.
    """
    folder = description_file.parent
    _refuse_parallel(parallel, recipes, callbacks)
    _refuse(description_file, description, resume)
    recipes = [recipe.with_(**{"storage.final_checkpoint": False}) for recipe in recipes]  # they are not extended
    tasks = Tasks() if tasks is None else tasks
    left = [recipe for recipe in recipes if finished_summary(recipe, warn=False) is None]
    if not left:
        log.warning("all %d runs in '%s' are finished: there is nothing to resume", len(recipes), folder)
    summaries: list[Summary] = []
    with ExitStack() as stack:
        if parallel > 1:
            tasks.shared = stack.enter_context(SharedDatasets())
        _rehearse(left, tasks)
        _make(folder)
        stack.callback(RunLock(folder).release)
        interrupts = stack.enter_context(Interrupts())
        # again: another process may have started a series before this one got the lock
        _refuse(description_file, description, resume)
        if not description_file.exists():
            text = yaml.safe_dump(dict(description), sort_keys=False, allow_unicode=True, width=100)
            write_whole(description_file, text.encode())
        if parallel > 1:
            run_parallel(left, parallel, interrupts, partial(_report_last_round, on_run), tasks.shared)
        command = trusted_code.resume_command(folder, description)
        for number, recipe in enumerate(recipes, 1):
            summary = finished_summary(recipe, warn=False)
            if summary is None and interrupts.asked is not None:
                raise Interrupted(f"stopped after run {number - 1} of {len(recipes)}", command, interrupts.asked)
            if summary is None:
                on_round = on_run(recipe) if on_run else None
                experiment = Experiment(recipe, task=tasks[recipe], on_round=on_round, callbacks=callbacks)
                try:
                    summary = experiment.run(resume=True)
                except Interrupted as stopped:
                    when = f"run {number} of {len(recipes)} {stopped.when}"
                    raise Interrupted(when, command, stopped.signal) from None
            summary["run_dir"] = str(recipe.out)
            summaries.append(summary)
            if on_end is not None:
                on_end(summaries)
    return summaries


def _refuse_parallel(parallel: int, recipes: Iterable[Recipe], callbacks: Sequence[object]) -> None:
    """Raise a UserError if the runs cannot be separate processes."""
    if parallel < 1:
        raise UserError(f"parallel = {parallel}: must be at least 1")
    if parallel == 1:
        return
    remedy = "leave parallel out (engine='processes' trains clients in parallel)"
    if callbacks:
        raise UserError(
            f"callbacks: with parallel = {parallel} each run is another process, which cannot call Python objects of "
            f"this one; {remedy}"
        )
    if field := next(filter(None, map(local_object, recipes)), None):
        raise UserError(
            f"parallel = {parallel}: each run is another process, which does not have the Python object {field}; "
            f"{remedy}, or name a file of yours"
        )


def _report_last_round(on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None, recipe: Recipe) -> None:
    """Call `on_run`'s callback with the last round of a run that another process has finished."""
    assert recipe.out is not None
    if on_run is not None:
        on_run(recipe)(read_rounds(recipe.out)[-1])


class Tasks:
    """Tasks of recipes, cached: recipes with the same data share the dataset and its division among clients."""

    shared: SharedDatasets | None = None
    """Where datasets are shared with child processes; None if they are not."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._tasks: dict[str, Task] = {}

    def __getitem__(self, recipe: Recipe) -> Task:
        reading = reading_of(recipe.data)
        federation = recipe.model_dump_json(include={"data", "model", "seed"})
        if federation not in self._tasks:
            if reading not in self._datasets:
                dataset = load_dataset(recipe)
                self._datasets[reading] = self.shared.add(recipe.data, dataset) if self.shared else dataset
            self._tasks[federation] = make_task(recipe, self._datasets[reading])
        return self._tasks[federation]


def _refuse(file: Path, description: Mapping[str, Any], resume: bool) -> None:
    if holds_run(file.parent):
        raise UserError(f"out = '{file.parent}' holds a single run: choose another folder")
    if not file.exists():
        return
    if not resume:
        raise UserError(
            f"out = '{file.parent}' already holds runs (see {file.name}): choose another folder, remove this one, "
            f"or resume the runs: {trusted_code.resume_command(file.parent, read_yaml(file))}"
        )
    refuse_differences(description, read_yaml(file), file.parent)


def _rehearse(recipes: Sequence[Recipe], tasks: Tasks) -> None:
    """Build each recipe's models before any run starts, so that errors appear early; seeds share one check."""
    alike = {recipe.model_dump_json(exclude={"seed", "out"}): recipe for recipe in reversed(recipes)}
    for recipe in reversed(alike.values()):
        Experiment(recipe, task=tasks[recipe]).setup.build()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out = '{folder}' cannot be created: {error.strerror}; choose another folder") from None
