"""Sweeps: one recipe with other values of some fields, each with several seeds; a grid, or settings drawn at random.

A sweep only reports. Which setting is best is for whoever reads it to say, and not by the test data it shows.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.config.loading import raw_recipe, read_list, read_recipe
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError
from fedloom.core.registry import short
from fedloom.core.rng import key, numpy_generator
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.run_folder import RunFolder, write_json
from fedloom.report.sweep import Setting, short_names
from fedloom.runs.series import run_series

SWEEP, RESULTS = "sweep.yaml", "sweep.json"


class Sweep(Section):
    """Which fields take which values."""

    over: dict[str, Any] = Field(
        min_length=1, description="by field: a list of values, or a range 0.001..0.1 (log-uniform, with `random`)"
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    random: int | None = Field(None, ge=1, description="draw so many settings instead of trying all")
    parallel: int = Field(1, ge=1, description="runs at a time, each a process of one thread")


@dataclass(frozen=True)
class Range:
    """Log-uniform between two bounds; whole numbers where both are."""

    low: float
    high: float

    def draw(self, *purpose: object) -> float:
        """Rounded to four digits, so that it can be read and repeated."""
        share = numpy_generator(*purpose).random()
        value = exp(log(self.low) + share * (log(self.high) - log(self.low)))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return min(self.high, max(self.low, round(value)))
        return float(f"{value:.4g}")


def sweep(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    over: Mapping[str, Any] | None = None,
    seeds: Iterable[int] | None = None,
    random: int | None = None,
    parallel: int | None = None,
    resume: bool = False,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    trust_code: bool = False,
    **fields: Any,
) -> list[Summary]:
    """Runs a recipe with every setting and seed; returns the summaries, each with its `setting`.

    What is not given here is taken from the recipe's `sweep` section. `resume` goes on with the sweep in `out`.
    `trust_code` as in `run`.

    >>> fedloom.sweep(method="fedprox", over={"method.mu": [0.01, 0.1, 1]}, seeds=[0, 1])   # doctest: +SKIP
    """
    trusted_code.allow(over)
    values = read_recipe(recipe, fields, trust_code=trust_code)
    chosen = _sweep(values, {"over": over, "seeds": seeds and list(seeds), "random": random, "parallel": parallel})
    values.pop("compare", None)  # the recipe's other use
    out = values.pop("out", None)
    if resume and out is None:
        raise UserError("--resume: say which sweep: --out FOLDER, or `fedloom resume FOLDER`")
    folder = Path(out or RunFolder.fresh(Path("runs"), "sweep"))
    found = list(settings(chosen))
    recipes: list[Recipe] = []
    ran: list[Setting] = []
    for setting in found:
        for seed in chosen.seeds:
            place = folder / f"{_folder_name(setting, found)}-s{seed}"
            recipes.append(Recipe.parse(raw_recipe(values, setting) | {"seed": seed, "out": str(place)}))
            ran.append(setting)

    def labelled(summaries: list[Summary]) -> list[Summary]:
        for summary, setting in zip(summaries, ran, strict=False):
            summary["setting"], summary["label"] = setting, label(setting, found)
        return summaries

    return labelled(
        run_series(
            folder / SWEEP,
            json.loads(json.dumps(values | {"sweep": chosen.model_dump(mode="json")}, default=str)),
            recipes,
            resume=resume,
            parallel=chosen.parallel,
            on_run=on_run,
            on_end=lambda so_far: write_json(folder / RESULTS, {"runs": labelled(so_far)}),
        )
    )


def holds_sweep(folder: str | Path) -> bool:
    """Whether a sweep was begun in this folder."""
    return (Path(folder) / SWEEP).exists()


def settings(sweep: Sweep) -> Iterator[Setting]:
    """All combinations of the values, or as many as are to be drawn; each once."""
    choices = {path: _choices(path, values, sweep.random) for path, values in sweep.over.items()}
    if sweep.random is None:
        listed = [values for values in choices.values() if not isinstance(values, Range)]
        yield from (dict(zip(choices, values, strict=True)) for values in product(*listed))
        return
    drawn: dict[str, Setting] = {}
    for number in range(100 * sweep.random):  # the first ones are the same, however many are drawn
        setting = {path: _draw(number, path, values) for path, values in choices.items()}
        drawn.setdefault(repr(setting), setting)
        if len(drawn) == sweep.random:
            break
    yield from drawn.values()


def label(setting: Setting, among: Iterable[Setting] = ()) -> str:
    """`mu=0.1 lr=0.01`: fields by their last part, or in full where two have the same."""
    names = short_names({path for one in (setting, *among) for path in one})
    return " ".join(
        f"{names[path]}={short(value) if isinstance(value, str) else value}" for path, value in setting.items()
    )


def read_over(text: str) -> tuple[str, Any]:
    """`method.mu=0.01,0.1,1` → the field and its values."""
    path, equals, values = text.partition("=")
    if not equals or not values.strip() or not all(path.strip().split(".")):
        raise UserError(f"--over {text}: write field=value,value,… for example --over method.mu=0.01,0.1,1")
    return path.strip(), read_list(f"--over {text}", values)


def _sweep(values: dict[str, Any], given: Mapping[str, Any]) -> Sweep:
    """Takes the `sweep` section out of a recipe's values, with what was given instead."""
    section = values.pop("sweep", None) or {}
    if not isinstance(section, Mapping):
        raise UserError(f"sweep = {section!r}: must be a section with the fields {', '.join(Sweep.model_fields)}")
    own = {"seeds": [values["seed"]]} if "seed" in values else {}
    chosen = own | dict(section) | {name: what for name, what in given.items() if what is not None}
    if not chosen.get("over"):
        raise UserError("sweep.over: say what to sweep over, for example --over method.mu=0.01,0.1,1")
    for path in ("seed", "out"):
        if path in chosen["over"]:
            raise UserError(f"sweep.over.{path}: cannot be swept over; seeds are given by --seeds 0,1,2 (sweep.seeds)")
    return checked(Sweep, chosen, "sweep")


def _choices(path: str, values: Any, random: int | None) -> list[Any] | Range:
    values = list(values) if isinstance(values, list | tuple) else [values]
    if not values:
        raise UserError(f"sweep.over.{path} = []: give it a value at least")
    ranges = [value for value in values if isinstance(value, str) and ".." in value and "/" not in value]
    if not ranges:
        return list({repr(value): value for value in values}.values())
    if len(values) > 1:
        raise UserError(f"sweep.over.{path} = {values!r}: either values or one range")
    if random is None:
        raise UserError(
            f"sweep.over.{path} = '{ranges[0]}': values are drawn from a range; say how many settings, --random 20 "
            "(sweep.random), or list the values"
        )
    return _range(path, ranges[0])


def _range(path: str, text: str) -> Range:
    try:
        low, high = (float(end) if re.search(r"[.eE]", end) else int(end) for end in text.split("..", 1))
    except ValueError:
        raise UserError(f"sweep.over.{path} = '{text}': a range has two numbers, as in 0.001..0.1") from None
    if not 0 < low < high < float("inf"):
        raise UserError(f"sweep.over.{path} = '{text}': a range is log-uniform: 0 < low < high; or list the values")
    return Range(low, high)


def _draw(number: int, path: str, values: list[Any] | Range) -> Any:
    if isinstance(values, Range):
        return values.draw("sweep", number, path)
    return values[numpy_generator("sweep", number, path).integers(len(values))]


def _folder_name(setting: Setting, among: Iterable[Setting]) -> str:
    """Of a setting: readable, and its own also where characters had to go."""
    name = label(setting, among).replace(" ", "_")
    safe = re.sub(r"[^\w.=+-]+", "-", name)[:100]
    return safe if safe == name and "" not in safe.split("=") else f"{safe}-{key(repr(setting)) % 16**6:06x}"
