"""Comparisons of several methods and seeds on one federation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedloom.config.loading import read_yaml, section_name
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.errors import UserError
from fedloom.core.registry import short
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.run_folder import NEWCOMERS, RunFolder, write_json
from fedloom.report.progress import showing
from fedloom.runs.comparison import Comparison, labels_of, read_comparison, recipe_of, refuse_equal_methods
from fedloom.runs.newcomers import compare_newcomers
from fedloom.runs.objects import method_section, named, read_with_objects
from fedloom.runs.progress import on_run_of
from fedloom.runs.result import Runs
from fedloom.runs.series import Tasks, refuse_resume_without, run_series

COMPARISON = "comparison.yaml"
"""The file in a comparison's folder that describes all its runs. Their summaries are in comparison.json."""


def compare(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    methods: Iterable[Any] | None = None,
    seeds: Iterable[int] | None = None,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    callbacks: Sequence[object] = (),
    progress: bool | None = None,
    resume: bool = False,
    parallel: int = 1,
    report: bool | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> Runs:
    """Run several methods with several seeds on the same federation.

    Args:
        recipe: Path of a recipe file, the name of a shipped recipe, a mapping of values, or None for the defaults.
        methods: Methods, each a name, a section `{"name": "fedprox", "mu": 0.1}`, a class or an instance. In a
            section, `with` sets recipe fields for this method only: `{"name": "repper", "with":
            {"training.batch_size": 256}}`. Default: those of the recipe's `compare` section, else the recipe's method,
            else `local` and `fedavg`.
        seeds: Seeds for every method. Default: those of the recipe's `compare` section, else the recipe's seed.
        on_run: Called with each run's recipe before the run starts; must return a function that is called with the
            record of every round.
        callbacks: Objects with functions such as `on_round`, called in all runs, see `fedloom.Callback`. Not with
            `parallel`.
        progress: Show a progress bar. Default: in notebooks only.
        resume: Resume the comparison in `out`, or start it if the folder has none. Finished runs are not repeated.
        parallel: Number of runs at a time, each in a single-threaded process. `on_run`'s function is then called once
            per run, with the last record.
        report: Write report.html in the comparison's folder at the end. Default: the recipe's `compare.report`.
        trust_code: Allow the Python files that the recipe file names to be imported, see `run`.
        **fields: Recipe fields by short name (`rounds=5`) or path (`**{"training.rounds": 5}`).

    Returns:
        The summaries of all runs, method by method, each with a `label` and its `run_dir`.

    Raises:
        UserError: The recipe is invalid, or `out` holds runs that cannot be resumed with it.
        RunError: A run cannot continue, for example because too few clients responded, or a callback failed.
        Interrupted: Ctrl-C or SIGTERM stopped the comparison after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> runs = fedloom.compare(methods=["local", "fedavg"], data="digits", rounds=5)   # doctest: +SKIP
        >>> print(fedloom.table(runs))   # doctest: +SKIP
    """
    fields = named(fields)
    if isinstance(methods, str):
        raise UserError(f"methods = '{methods}': must be a list, such as methods=['local', '{methods}']")
    methods = None if methods is None else [method_section(method) for method in methods]
    trusted_code.allow(methods)
    values = read_with_objects(recipe, fields, trust_code=trust_code)
    values.pop("sweep", None)  # a recipe may describe both a comparison and a sweep
    methods = [fields["method"]] if methods is None and "method" in fields else methods
    seeds = [fields["seed"]] if seeds is None and "seed" in fields else seeds
    comparison = read_comparison(values, methods, seeds, report)
    if stray := [name for name in fields if name.startswith("method.")]:
        raise UserError(
            f"{stray[0]} = {fields[stray[0]]!r}: a comparison has several methods; set hyperparameters method by "
            "method in a recipe, compare: {methods: [fedavg, {name: fedprox, mu: 0.1}]}"
        )
    out = values.pop("out", None)
    if resume:
        refuse_resume_without(out)
    folder = Path(out or RunFolder.fresh(Path("runs"), "compare"))
    recipes = _recipes(values, comparison, folder)
    common = Recipe.parse(values | {"method": recipes[0].method.model_dump(), "seed": comparison.seeds[0]})
    refuse_equal_methods(recipes, comparison)
    if comparison.newcomers is not None and not common.data.newcomers:
        raise UserError(
            "compare.newcomers: the federation holds no clients out of training; set their number, for example "
            "data.newcomers: 5"
        )
    labels = [label for label in labels_of(comparison.methods) for _ in comparison.seeds]

    def labelled(summaries: list[Summary]) -> list[Summary]:
        for label, summary in zip(labels, summaries, strict=False):
            summary["label"] = label
        return summaries

    shared = common.model_dump(mode="json", exclude={"method", "seed", "out"})
    tasks = Tasks()
    with showing(progress) as start:
        found = run_series(
            folder / COMPARISON,
            shared | {"compare": comparison.model_dump(mode="json", exclude_none=True)},
            recipes,
            tasks=tasks,
            resume=resume,
            parallel=parallel,
            on_run=on_run_of(start, on_run),
            callbacks=callbacks,
            on_end=lambda so_far: write_json(folder / "comparison.json", {"runs": labelled(so_far)}),
        )
    runs = Runs(labelled(found), folder)
    if comparison.newcomers is not None:
        tested = compare_newcomers(runs, comparison.newcomers, common, [tasks[recipe] for recipe in recipes])
        write_json(folder / NEWCOMERS, tested)
    if comparison.report:
        runs.report()
    return runs


def _recipes(values: Mapping[str, Any], comparison: Comparison, folder: Path) -> list[Recipe]:
    """Return the recipes of all runs, method by method, each with its own folder."""
    return [
        recipe_of(values, method, seed, folder / f"{number:02d}-{short(str(section_name(method)))}-s{seed}")
        for number, (method, seed) in enumerate(product(comparison.methods, comparison.seeds))
    ]


def holds_comparison(folder: str | Path) -> bool:
    """Return whether a folder holds a comparison, finished or not."""
    return (Path(folder) / COMPARISON).exists()


def about(folder: Path) -> str | None:
    """Return the text about the comparison in a folder, its recipe's `compare.about`."""
    return (read_yaml(folder / COMPARISON).get("compare") or {}).get("about")


def resume_comparison(
    folder: str | Path,
    *,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    callbacks: Sequence[object] = (),
    progress: bool | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> Runs:
    """Resume an interrupted comparison; finished runs are not repeated.

    Args:
        folder: Folder of the comparison.
        on_run: Called with each run's recipe before the run starts; must return a function that is called with the
            record of every round.
        callbacks: Objects with functions such as `on_round`, called in all runs, see `fedloom.Callback`. Not with
            `parallel`.
        progress: Show a progress bar. Default: in notebooks only.
        trust_code: Allow the Python files that the comparison's recipe names to be imported.
        **fields: Recipe fields to change: only `engine`, `storage`, `log` and `data.dir` may differ.

    Returns:
        The summaries of all runs, as `compare` returns them.

    Raises:
        UserError: The folder holds no comparison, or a changed field affects results.
        RunError: A run cannot continue, for example because too few clients responded, or a callback failed.
        Interrupted: Ctrl-C or SIGTERM stopped the comparison after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> fedloom.resume_comparison("runs/demo", engine="processes")   # doctest: +SKIP
    """
    return compare(
        Path(folder) / COMPARISON, on_run=on_run, callbacks=callbacks, progress=progress, resume=True,
        trust_code=trust_code, **fields | {"out": folder},
    )  # fmt: skip
