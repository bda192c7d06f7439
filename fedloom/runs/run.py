"""Single runs: starting and resuming them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.config.loading import SHORT
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.experiment.loop import Experiment
from fedloom.experiment.records import RoundRecord
from fedloom.experiment.resume import finished_summary
from fedloom.experiment.run_folder import RECIPE, stored_values
from fedloom.report.progress import showing
from fedloom.runs.compare import holds_comparison
from fedloom.runs.objects import named, read_with_objects
from fedloom.runs.progress import on_round_of
from fedloom.runs.result import Run
from fedloom.runs.series import refuse_resume_without
from fedloom.runs.sweep import holds_sweep


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[object] = (),
    progress: bool | None = None,
    resume: bool = False,
    trust_code: bool = False,
    **fields: Any,
) -> Run:
    """Run one experiment.

    Args:
        recipe: Path of a recipe file, the name of a shipped recipe, a mapping of values, a `Recipe`, or None for the
            defaults.
        on_round: Called with the record of every round.
        callbacks: Objects with functions such as `on_round` and `on_evaluation`, see `fedloom.Callback`. They may end
            the run early by raising `fedloom.StopRun`.
        progress: Show a progress bar. Default: in notebooks only.
        resume: Resume the run in `out`, or start it if the folder has none. A finished run is not repeated.
        trust_code: Allow the Python files that the recipe file names to be imported. Files that the arguments name
            (`method="mine.py:Mine"`) are always allowed.
        **fields: Recipe fields by short name (`rounds=5`) or path (`**{"training.rounds": 5}`). Objects work too:
            `method` may be a method class or instance, `model` an `nn.Module`, a class or a function that returns one,
            and `data` a pair of arrays (x, y), a frame, a PyTorch or Hugging Face dataset, `{"train": …, "test": …}`
            of these, a dict of these per client, or a `fedloom.data.Dataset`.

    Returns:
        The run: its summary (`run["personal_accuracy"]`), frames of rounds and clients (`run.history`, `run.clients`),
        models (`run.personal(3)`), report and folder.

    Raises:
        UserError: The recipe is invalid, or `out` holds a run that cannot be resumed with it.
        RunError: The run cannot continue, for example because too few clients responded, or a callback failed.
        Interrupted: Ctrl-C or SIGTERM stopped the run after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> run = fedloom.run(method="fedprox", rounds=5, **{"method.mu": 0.01})   # doctest: +SKIP
        >>> run["personal_accuracy"], run.history["loss"]   # doctest: +SKIP
    """
    fields = named(fields)
    recipe = Recipe.parse(read_with_objects(recipe, fields, trust_code=trust_code))
    if resume:
        refuse_resume_without(recipe.out)
    if resume and recipe.out is not None and finished_summary(recipe):
        return Run(recipe.out)
    with showing(progress) as start:
        experiment = Experiment(recipe, on_round=on_round_of(recipe, start, on_round), callbacks=callbacks)
        return Run(experiment.run(resume=resume)["run_dir"])


def resume(
    run_dir: str | Path,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    callbacks: Sequence[object] = (),
    progress: bool | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> Run:
    """Resume an interrupted run from its last checkpoint, or extend a run to more rounds.

    The result is bit-identical to that of an uninterrupted run with this number of rounds.

    Args:
        run_dir: Folder of the run.
        on_round: Called with the record of every round.
        callbacks: Objects with functions such as `on_round` and `on_evaluation`, see `fedloom.Callback`. They may end
            the run early by raising `fedloom.StopRun`.
        progress: Show a progress bar. Default: in notebooks only.
        trust_code: Allow the Python files that the run's recipe names to be imported.
        **fields: Recipe fields to change: `engine`, `storage`, `log`, `data.dir`, and the total number of rounds
            (`rounds=300`), also of a finished run. Rounds cannot change if learning rates depend on their number. A run
            whose data were passed as an object needs the same object again: `data=(x, y)`.

    Returns:
        The run, as `run` returns it. A finished run is not repeated.

    Raises:
        UserError: The folder holds no run, its checkpoints cannot be used, or a field cannot be changed.
        RunError: The run cannot continue, for example because too few clients responded, or a callback failed.
        Interrupted: Ctrl-C or SIGTERM stopped the run after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> fedloom.resume("runs/20250101-120000-fedavg-digits-s0", engine="processes")   # doctest: +SKIP
        >>> fedloom.resume("runs/20250101-120000-fedavg-digits-s0", rounds=300)   # doctest: +SKIP
    """
    if holds_comparison(run_dir):
        raise UserError(f"'{run_dir}' holds a comparison: resume it with fedloom.resume_comparison('{run_dir}')")
    recipe = recipe_of(run_dir, fields, trust_code=trust_code)
    with showing(progress) as start:
        return resume_run(recipe, on_round_of(recipe, start, on_round), callbacks)


def resume_run(
    recipe: Recipe, on_round: Callable[[RoundRecord], None] | None = None, callbacks: Sequence[object] = ()
) -> Run:
    """Resume the run in `recipe.out`, as `resume` does, to the recipe's number of rounds."""
    if recipe.out is not None and finished_summary(recipe, extend=True):
        return Run(recipe.out)
    experiment = Experiment(recipe, on_round=on_round, callbacks=callbacks)
    return Run(experiment.run(resume=True, extend=True)["run_dir"])


def recipe_of(run_dir: str | Path, fields: Mapping[str, Any], *, trust_code: bool = False) -> Recipe:
    """Return the stored recipe of the run in a folder, with changed fields and `out` set to this folder.

    Raises:
        UserError: The folder holds no run, a field is invalid, or rounds are changed in a comparison or sweep.
    """
    changes = {SHORT.get(name, name): value for name, value in named(fields).items()}
    if trusted_code.deployment_of(Path(run_dir)) is not None:
        raise UserError(
            f"'{run_dir}' is the run of a deployment, whose data are at the organisations; resume it on its server: "
            + trusted_code.resume_command(Path(run_dir))
        )
    stored = Recipe.parse(stored_values(Path(run_dir)), trust_code=trust_code)
    recipe = stored.with_(**changes | {"out": str(run_dir)})
    series = Path(run_dir).absolute().parent
    if recipe.training.rounds != stored.training.rounds and (holds_comparison(series) or holds_sweep(series)):
        raise UserError(
            f"training.rounds = {recipe.training.rounds}: '{run_dir}' is a run of '{series.name}', whose runs have "
            f"equal numbers of rounds; start a new run: `fedloom run {Path(run_dir) / RECIPE} --rounds "
            f"{recipe.training.rounds} --out ANOTHER`"
        )
    return recipe
