"""Runs and comparisons from Python; the command line calls these."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.experiment import Experiment, Record, make_task
from fedloom.recipe import Recipe, Section, assign, read_yaml
from fedloom.storage.folder import RunFolder

SHORT = {
    "method": "method.name",
    "data": "data.name",
    "data_dir": "data.dir",
    "clients": "data.clients",
    "partition": "data.partition",
    "model": "model.name",
    "rounds": "training.rounds",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "lr": "training.optimizer.lr",
    "fraction": "training.fraction",
    "seed": "seed",
    "engine": "engine.name",
    "out": "out",
}
"""Short names of the fields that are set most often."""


class Comparison(Section):
    """Several methods and seeds on one recipe."""

    methods: tuple[str | dict[str, Any], ...] = Field(("local", "fedavg"), min_length=1)
    seeds: tuple[int, ...] = Field((0,), min_length=1)


def raw_recipe(source: str | Path | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values before they are checked: a file, a shipped name or a mapping, then single fields over it.

    Fields go by their short name (`rounds`) or their path (`training.rounds`).
    """
    values = dict(source) if isinstance(source, Mapping) else read_yaml(source) if source is not None else {}
    for name, value in fields.items():
        assign(values, SHORT.get(name, name), str(value) if isinstance(value, Path) else value)
    return values


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    on_round: Callable[[Record], None] | None = None,
    **fields: Any,
) -> Record:
    """Runs one experiment and returns its summary.

    >>> fedloom.run(method="fedprox", data="digits", rounds=5, **{"method.mu": 0.01})   # doctest: +SKIP
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.parse(raw_recipe(recipe, fields))
    return Experiment(recipe, on_round=on_round).run()


def compare(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    methods: Iterable[str | dict[str, Any]] | None = None,
    seeds: Iterable[int] | None = None,
    on_run: Callable[[Recipe], Callable[[Record], None]] | None = None,
    **fields: Any,
) -> list[Record]:
    """Runs several methods with several seeds on the same federation; returns the summaries, method by method.

    `on_run(recipe)` is called before each run and returns what is told of its rounds.
    """
    values = raw_recipe(recipe, fields)
    given = values.pop("compare", {})
    if methods is not None:
        given["methods"] = list(methods)
    if seeds is not None:
        given["seeds"] = list(seeds)
    comparison = Comparison.model_validate(given)
    folder = Path(values.pop("out", None) or RunFolder.fresh(Path("runs"), "compare"))
    recipes: list[Recipe] = []
    for method in comparison.methods:
        for seed in comparison.seeds:
            named = {"name": method} if isinstance(method, str) else method
            out = folder / f"{len(recipes):02d}-{named.get('name')}-s{seed}"
            recipes.append(Recipe.parse(values | {"method": named, "seed": seed, "out": str(out)}))
    tasks = {seed: make_task(next(r for r in recipes if r.seed == seed)) for seed in comparison.seeds}
    return [Experiment(one, task=tasks[one.seed], on_round=on_run(one) if on_run else None).run() for one in recipes]
