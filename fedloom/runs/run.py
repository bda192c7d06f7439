"""Runs one experiment, or resumes it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.config.loading import SHORT, read_recipe
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.experiment.loop import Experiment
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.resume import ended
from fedloom.experiment.run_folder import stored_values
from fedloom.runs.compare import holds_comparison


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    resume: bool = False,
    trust_code: bool = False,
    **fields: Any,
) -> Summary:
    """Runs one experiment and returns its summary. `resume` goes on with the run in `out`, or begins it.

    Python files that the arguments name (`method="mine.py:Mine"`) are imported; those that only a recipe file names
    are imported with `trust_code`.

    >>> fedloom.run(method="fedprox", data="digits", rounds=5, **{"method.mu": 0.01})   # doctest: +SKIP
    """
    if isinstance(recipe, Recipe):
        recipe = recipe.with_(**{SHORT.get(name, name): value for name, value in fields.items()})
    else:
        recipe = Recipe.parse(read_recipe(recipe, fields, trust_code=trust_code))
    if resume and recipe.out is None:
        raise UserError("--resume: say which run: --out FOLDER, or `fedloom resume FOLDER`")
    if resume and (summary := ended(recipe)):
        return summary
    return Experiment(recipe, on_round=on_round).run(resume=resume)


def resume(
    run_dir: str | Path,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> Summary:
    """Goes on with an interrupted run from its last checkpoint, and returns its summary.

    The result is that of a run that was never interrupted, bit for bit. Fields may say where and how fast it goes on.
    `trust_code` imports the Python files that the run's recipe names.

    >>> fedloom.resume("runs/20250101-120000-fedavg-digits-s0", engine="processes")   # doctest: +SKIP
    """
    if holds_comparison(run_dir):
        raise UserError(f"'{run_dir}' holds a comparison: go on with it by fedloom.resume_comparison('{run_dir}')")
    return run(recipe_of(run_dir, fields, trust_code=trust_code), on_round=on_round, resume=True)


def recipe_of(run_dir: str | Path, fields: Mapping[str, Any], *, trust_code: bool = False) -> Recipe:
    """The recipe with which the run in a folder goes on."""
    changes = {SHORT.get(name, name): value for name, value in fields.items()}
    stored = Recipe.parse(stored_values(Path(run_dir)), trust_code=trust_code)
    return stored.with_(**changes | {"out": str(run_dir)})
