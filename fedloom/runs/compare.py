"""Comparisons of several methods and seeds on one federation."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from fedloom.config.loading import read_recipe, section_name
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError
from fedloom.core.registry import short
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.run_folder import RunFolder, write_json
from fedloom.report.table import comparison_table
from fedloom.runs.objects import method_section, named
from fedloom.runs.series import run_series

COMPARISON = "comparison.yaml"
"""The file in a comparison's folder that describes all its runs. Their summaries are in comparison.json."""


class Comparison(Section):
    """The recipe section `compare`: methods and seeds that share the rest of the recipe."""

    methods: tuple[str | dict[str, Any], ...] = Field(
        ("local", "fedavg"), min_length=1, description="methods, each a name or a section {name: fedprox, mu: 0.1}"
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="seeds; every method is run with each of them")


def compare(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    methods: Iterable[Any] | None = None,
    seeds: Iterable[int] | None = None,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    resume: bool = False,
    trust_code: bool = False,
    **fields: Any,
) -> list[Summary]:
    """Run several methods with several seeds on the same federation.

    Args:
        recipe: Path of a recipe file, the name of a shipped recipe, a mapping of values, or None for the defaults.
        methods: Methods, each a name, a section `{"name": "fedprox", "mu": 0.1}`, a class or an instance. Default:
            those of the recipe's `compare` section, else the recipe's method, else `local` and `fedavg`.
        seeds: Seeds for every method. Default: those of the recipe's `compare` section, else the recipe's seed.
        on_run: Called with each run's recipe before the run starts; must return a function that is called with the
            record of every round.
        resume: Resume the comparison in `out`, or start it if the folder has none. Finished runs are not repeated.
        trust_code: Allow the Python files that the recipe file names to be imported, see `run`.
        **fields: Recipe fields by short name (`rounds=5`) or path (`**{"training.rounds": 5}`).

    Returns:
        The summaries of all runs, method by method, each with a `label` and its `run_dir`.

    Raises:
        UserError: The recipe is invalid, or `out` holds runs that cannot be resumed with it.
        RunError: A run cannot continue, for example because too few clients responded.
        Interrupted: Ctrl-C or SIGTERM stopped the comparison after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> runs = fedloom.compare(methods=["local", "fedavg"], data="digits", rounds=5)   # doctest: +SKIP
        >>> print(fedloom.table(runs))   # doctest: +SKIP
    """
    fields = named(fields)
    methods = None if methods is None else [method_section(method) for method in methods]
    trusted_code.allow(methods)
    values = read_recipe(recipe, fields, trust_code=trust_code)
    values.pop("sweep", None)  # a recipe may describe both a comparison and a sweep
    methods = [fields["method"]] if methods is None and "method" in fields else methods
    seeds = [fields["seed"]] if seeds is None and "seed" in fields else seeds
    comparison = _comparison(values, methods, seeds)
    if stray := [name for name in fields if name.startswith("method.")]:
        raise UserError(
            f"{stray[0]} = {fields[stray[0]]!r}: a comparison has several methods; set hyperparameters method by "
            "method in a recipe, compare: {methods: [fedavg, {name: fedprox, mu: 0.1}]}"
        )
    out = values.pop("out", None)
    if resume and out is None:
        raise UserError(
            "--resume: out is missing; name the comparison's folder: --out FOLDER, or `fedloom resume FOLDER`"
        )
    folder = Path(out or RunFolder.fresh(Path("runs"), "compare"))
    recipes: list[Recipe] = []
    for method in comparison.methods:
        for seed in comparison.seeds:
            place = folder / f"{len(recipes):02d}-{short(str(section_name(method)))}-s{seed}"
            recipes.append(Recipe.parse(values | {"method": method, "seed": seed, "out": str(place)}))
    labels = [label for label in _labels(comparison.methods) for _ in comparison.seeds]

    def labelled(summaries: list[Summary]) -> list[Summary]:
        for label, summary in zip(labels, summaries, strict=False):
            summary["label"] = label
        return summaries

    common = recipes[0].model_dump(mode="json", exclude={"method", "seed", "out"})
    return labelled(
        run_series(
            folder / COMPARISON,
            common | {"compare": comparison.model_dump(mode="json")},
            recipes,
            resume=resume,
            on_run=on_run,
            on_end=lambda so_far: write_json(folder / "comparison.json", {"runs": labelled(so_far)}),
        )
    )


def holds_comparison(folder: str | Path) -> bool:
    """Return whether a folder holds a comparison, finished or not."""
    return (Path(folder) / COMPARISON).exists()


def resume_comparison(
    folder: str | Path,
    *,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> list[Summary]:
    """Resume an interrupted comparison; finished runs are not repeated.

    Args:
        folder: Folder of the comparison.
        on_run: Called with each run's recipe before the run starts; must return a function that is called with the
            record of every round.
        trust_code: Allow the Python files that the comparison's recipe names to be imported.
        **fields: Recipe fields to change: only `engine`, `storage`, `log` and `data.dir` may differ.

    Returns:
        The summaries of all runs, as `compare` returns them.

    Raises:
        UserError: The folder holds no comparison, or a changed field affects results.
        RunError: A run cannot continue, for example because too few clients responded.
        Interrupted: Ctrl-C or SIGTERM stopped the comparison after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> fedloom.resume_comparison("runs/demo", engine="processes")   # doctest: +SKIP
    """
    return compare(
        Path(folder) / COMPARISON, on_run=on_run, resume=True, trust_code=trust_code, **fields | {"out": folder}
    )


def table(summaries: list[Summary]) -> str:
    """Format the summaries of a comparison as a text table.

    Args:
        summaries: Summaries as `compare` returns them.

    Returns:
        The table, at most 100 columns wide.

    Example:
        >>> print(fedloom.table(fedloom.compare("demo")))   # doctest: +SKIP
    """
    console = Console(width=100, file=StringIO())
    # Not read from the file: in a notebook, rich displays output instead of writing it there.
    with console.capture() as captured:
        console.print(comparison_table(summaries))
    return captured.get()


def _comparison(values: dict[str, Any], methods: Iterable[Any] | None, seeds: Iterable[int] | None) -> Comparison:
    """Remove the `compare` section from a recipe's values and return it, overridden by `methods` and `seeds`."""
    given = values.pop("compare", None) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"compare = {given!r}: must be a section with the fields {', '.join(Comparison.model_fields)}")
    own: dict[str, Any] = {"methods": [values["method"]]} if "method" in values else {}
    own |= {"seeds": [values["seed"]]} if "seed" in values else {}
    chosen = {"methods": methods and list(methods), "seeds": seeds and list(seeds)}
    return checked(
        Comparison, own | dict(given) | {name: what for name, what in chosen.items() if what is not None}, "compare"
    )


def _labels(methods: Iterable[str | dict[str, Any]]) -> list[str]:
    """Return distinct labels: a method's name, and its hyperparameters if the name occurs more than once."""
    methods = list(methods)
    names = [str(section_name(method)) for method in methods]
    times, files = Counter(names), Counter(map(short, set(names)))
    labels = []
    for method, name in zip(methods, names, strict=True):
        settings = method if isinstance(method, Mapping) and times[name] > 1 else {}
        title = short(name) if files[short(name)] == 1 else name
        labels.append(" ".join([title, *(f"{n}={v}" for n, v in settings.items() if n != "name")]))
    return labels
