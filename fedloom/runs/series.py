"""Several runs in one folder, one after another, resumable as a whole: a comparison, a sweep.

A YAML file in the folder describes them. Finished runs are taken as they are, an interrupted one goes on from its last
checkpoint, the rest run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fedloom.config.loading import read_yaml
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.signals import Interrupted, Interrupts
from fedloom.core.task import Task
from fedloom.data import Dataset
from fedloom.experiment.build import load_dataset, make_task
from fedloom.experiment.files import write_whole
from fedloom.experiment.lock import RunLock
from fedloom.experiment.loop import Experiment
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.resume import ended, refuse_differences
from fedloom.experiment.run_folder import holds_run, read_rounds
from fedloom.runs.parallel import run_beside

log = logging.getLogger("fedloom")


def run_series(
    described: Path,
    description: Mapping[str, Any],
    recipes: Sequence[Recipe],
    *,
    resume: bool = False,
    parallel: int = 1,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    on_end: Callable[[list[Summary]], None] | None = None,
) -> list[Summary]:
    """Runs all recipes (each has its own `out`, in the folder of `described`) and returns their summaries.

    `described` is the file that holds the description; one that is there already is refused, unless to `resume`, and
    then it must say the same. Several runs at a time (`parallel`) are processes of their own. `on_run(recipe)` gives
    what is told of a run's rounds; `on_end` is given the summaries so far after each run.
    """
    folder = described.parent
    _refuse(described, description, resume)
    tasks = Tasks()
    left = [recipe for recipe in recipes if ended(recipe, tell=False) is None]
    if not left:
        log.warning("all %d runs in '%s' are finished: there is nothing to resume", len(recipes), folder)
    _rehearse(left, tasks)
    summaries: list[Summary] = []
    with ExitStack() as stack:
        _make(folder)
        stack.callback(RunLock(folder).release)
        interrupts = stack.enter_context(Interrupts())
        _refuse(described, description, resume)  # another process may have begun in the meantime
        if not described.exists():
            text = yaml.safe_dump(dict(description), sort_keys=False, allow_unicode=True, width=100)
            write_whole(described, text.encode())
        if parallel > 1:
            run_beside(left, parallel, interrupts, partial(_tell_end, on_run))
        for number, recipe in enumerate(recipes, 1):
            summary = ended(recipe, tell=False)
            if summary is None and interrupts.asked is not None:
                when = f"stopped after run {number - 1} of {len(recipes)}"
                raise Interrupted(when, trusted_code.resume_command(folder, description), interrupts.asked)
            if summary is None:
                experiment = Experiment(recipe, task=tasks[recipe], on_round=on_run(recipe) if on_run else None)
                try:
                    summary = experiment.run(resume=True)
                except Interrupted as stopped:
                    when = f"run {number} of {len(recipes)} {stopped.when}"
                    command = trusted_code.resume_command(folder, description)
                    raise Interrupted(when, command, stopped.signal) from None
            summary["run_dir"] = str(recipe.out)
            summaries.append(summary)
            if on_end is not None:
                on_end(summaries)
    return summaries


def _tell_end(on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None, recipe: Recipe) -> None:
    """A run that was elsewhere is told of when it ends, by its last round."""
    assert recipe.out is not None
    if on_run is not None:
        on_run(recipe)(read_rounds(recipe.out)[-1])


class Tasks:
    """Tasks of recipes: the same images are loaded once, the same federation is dealt out once."""

    def __init__(self) -> None:
        self._datasets: dict[tuple[Any, ...], Dataset] = {}
        self._tasks: dict[str, Task] = {}

    def __getitem__(self, recipe: Recipe) -> Task:
        images = (recipe.data.name, recipe.data.dir, recipe.data.size)
        federation = recipe.model_dump_json(include={"data", "model", "seed"})
        if federation not in self._tasks:
            if images not in self._datasets:
                self._datasets[images] = load_dataset(recipe)
            self._tasks[federation] = make_task(recipe, self._datasets[images])
        return self._tasks[federation]


def _refuse(described: Path, description: Mapping[str, Any], resume: bool) -> None:
    if holds_run(described.parent):
        raise UserError(f"out = '{described.parent}' holds a single run: choose another folder")
    if not described.exists():
        return
    if not resume:
        raise UserError(
            f"out = '{described.parent}' holds runs already (see {described.name}): choose another folder, remove it, "
            f"or go on with them: {trusted_code.resume_command(described.parent, read_yaml(described))}"
        )
    refuse_differences(description, read_yaml(described), described.parent)


def _rehearse(recipes: Sequence[Recipe], tasks: Tasks) -> None:
    """What cannot be built is found before anything runs; once for all seeds."""
    alike = {recipe.model_dump_json(exclude={"seed", "out"}): recipe for recipe in reversed(recipes)}
    for recipe in reversed(alike.values()):
        Experiment(recipe, task=tasks[recipe]).setup.build()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out = '{folder}' cannot be made: {error.strerror}; choose another folder") from None
