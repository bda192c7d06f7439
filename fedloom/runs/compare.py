"""Compares several methods and seeds on one federation."""

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
from fedloom.runs.series import run_series

COMPARISON = "comparison.yaml"
"""In the folder of a comparison: the recipe of it all. Its summaries are in comparison.json."""


class Comparison(Section):
    """Several methods and seeds on one recipe."""

    methods: tuple[str | dict[str, Any], ...] = Field(("local", "fedavg"), min_length=1)
    seeds: tuple[int, ...] = Field((0,), min_length=1)


def compare(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    methods: Iterable[str | dict[str, Any]] | None = None,
    seeds: Iterable[int] | None = None,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    resume: bool = False,
    trust_code: bool = False,
    **fields: Any,
) -> list[Summary]:
    """Runs several methods with several seeds on the same federation; returns the summaries, method by method.

    Methods and seeds are those given, else the recipe's `compare` section's, else the recipe's own method and seed.
    `on_run(recipe)` is called before each run and returns what is told of its rounds. `resume` goes on with the
    comparison in `out`, or begins it: finished runs are taken as they are. `trust_code` as in `run`.
    """
    methods = None if methods is None else list(methods)
    trusted_code.allow(methods)
    values = read_recipe(recipe, fields, trust_code=trust_code)
    values.pop("sweep", None)  # the recipe's other use
    methods = [fields["method"]] if methods is None and "method" in fields else methods
    seeds = [fields["seed"]] if seeds is None and "seed" in fields else seeds
    comparison = _comparison(values, methods, seeds)
    if stray := [name for name in fields if name.startswith("method.")]:
        raise UserError(
            f"{stray[0]} = {fields[stray[0]]!r}: a comparison has several methods; write hyperparameters beside each "
            "of them in a recipe, compare: {methods: [fedavg, {name: fedprox, mu: 0.1}]}"
        )
    out = values.pop("out", None)
    if resume and out is None:
        raise UserError("--resume: say which comparison: --out FOLDER, or `fedloom resume FOLDER`")
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
    """Whether a comparison was begun in this folder."""
    return (Path(folder) / COMPARISON).exists()


def resume_comparison(
    folder: str | Path,
    *,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> list[Summary]:
    """Resumes an interrupted comparison: finished runs are taken as they are. Arguments as in `resume`."""
    return compare(
        Path(folder) / COMPARISON, on_run=on_run, resume=True, trust_code=trust_code, **fields | {"out": folder}
    )


def table(summaries: list[Summary]) -> str:
    """The table of a comparison, as text to print."""
    console = Console(width=100, file=StringIO())
    # Not read from the file: in a notebook, rich displays output instead of writing it there.
    with console.capture() as captured:
        console.print(comparison_table(summaries))
    return captured.get()


def _comparison(values: dict[str, Any], methods: Iterable[Any] | None, seeds: Iterable[int] | None) -> Comparison:
    """Takes the `compare` section out of a recipe's values, with what was given instead."""
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
    """What tells methods apart: the name, and where it comes twice the hyperparameters."""
    methods = list(methods)
    names = [str(section_name(method)) for method in methods]
    times, files = Counter(names), Counter(map(short, set(names)))
    labels = []
    for method, name in zip(methods, names, strict=True):
        settings = method if isinstance(method, Mapping) and times[name] > 1 else {}
        title = short(name) if files[short(name)] == 1 else name
        labels.append(" ".join([title, *(f"{n}={v}" for n, v in settings.items() if n != "name")]))
    return labels
