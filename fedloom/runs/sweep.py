"""Sweeps: one recipe with several values of some fields and several seeds, as a grid or drawn at random.

A sweep reports the test accuracy of all settings, which must not be used to choose one. If the split has validation
samples, the setting that is best on them is marked; otherwise none is.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.config.loading import raw_recipe, read_list
from fedloom.config.recipe import Recipe
from fedloom.core import trusted_code
from fedloom.core.checking import Section, checked
from fedloom.core.errors import UserError
from fedloom.core.registry import short
from fedloom.core.rng import key, numpy_generator
from fedloom.experiment.records import RoundRecord, Summary
from fedloom.experiment.run_folder import RunFolder, write_json
from fedloom.report.progress import showing
from fedloom.report.sweep import Setting, best_setting, short_names
from fedloom.runs.objects import named, read_with_objects
from fedloom.runs.progress import on_run_of
from fedloom.runs.result import Runs
from fedloom.runs.series import Seeds, refuse_resume_without, run_series, seed_list

SWEEP, RESULTS = "sweep.yaml", "sweep.json"


class Sweep(Section):
    """The recipe section `sweep`: which fields take which values."""

    over: dict[str, Any] = Field(
        min_length=1,
        description="values by field path: a list, or with random a range such as 0.001..0.1 (log-uniform)",
    )
    seeds: Seeds = Field((0,), min_length=1, description="seeds; every setting is run with each of them")
    random: int | None = Field(
        None, ge=1, description="number of settings to draw at random; default: all combinations of the values"
    )
    parallel: int = Field(1, ge=1, description="number of runs at a time, each in a single-threaded process")


@dataclass(frozen=True)
class Range:
    """A log-uniform distribution between two bounds; over integers if both bounds are integers."""

    low: float
    high: float

    def draw(self, *purpose: object) -> float:
        """Draw a value by key, rounded to four significant digits so that it is readable and can be repeated."""
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
    progress: bool | None = None,
    resume: bool = False,
    on_run: Callable[[Recipe], Callable[[RoundRecord], None]] | None = None,
    callbacks: Sequence[object] = (),
    trust_code: bool = False,
    **fields: Any,
) -> Runs:
    """Run a recipe with every setting and seed.

    Arguments that are not given are taken from the recipe's `sweep` section.

    Args:
        recipe: Path of a recipe file, the name of a shipped recipe, a mapping of values, or None for the defaults.
        over: Values by field, named by short name or path: a list, or a range such as `"0.001..0.1"` (with `random`).
        seeds: Seeds for every setting. Default: the recipe's seed.
        random: Number of settings to draw at random. Default: all combinations of the values.
        parallel: Number of runs at a time, each in a single-threaded process. Default: 1.
        callbacks: Objects with functions such as `on_round`, called in all runs, see `fedloom.Callback`. Not with
            `parallel`.
        progress: Show a progress bar. Default: in notebooks only.
        resume: Resume the sweep in `out`, or start it if the folder has none. Finished runs are not repeated.
        on_run: Called with each run's recipe; must return a function that is called with the record of every round
            (of parallel runs: with the last record, when the run has finished).
        trust_code: Allow the Python files that the recipe file names to be imported, see `run`.
        **fields: Recipe fields by short name (`rounds=5`) or path (`**{"training.rounds": 5}`).

    Returns:
        The summaries of all runs, setting by setting, each with its `setting` (values by field), a `label` and its
        `run_dir`.

    Raises:
        UserError: The recipe or the sweep is invalid, or `out` holds runs that cannot be resumed with it.
        RunError: A run cannot continue, for example because too few clients responded, or a callback failed.
        Interrupted: Ctrl-C or SIGTERM stopped the sweep after a checkpoint; a KeyboardInterrupt.

    Example:
        >>> runs = fedloom.sweep(method="fedprox", over={"method.mu": [0.01, 0.1]}, seeds=[0, 1])   # doctest: +SKIP
        >>> runs[0]["setting"]   # doctest: +SKIP
        {'method.mu': 0.01}
    """
    fields = named(fields)
    over = None if over is None else {path: _names_of(path, values) for path, values in over.items()}
    trusted_code.allow(over)
    values = read_with_objects(recipe, fields, trust_code=trust_code)
    chosen = _sweep(values, {"over": over, "seeds": seed_list(seeds), "random": random, "parallel": parallel})
    values.pop("compare", None)  # a recipe may describe both a comparison and a sweep
    out = values.pop("out", None)
    if resume:
        refuse_resume_without(out)
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

    with showing(progress) as start:
        summaries = run_series(
            folder / SWEEP,
            json.loads(json.dumps(values | {"sweep": chosen.model_dump(mode="json")}, default=str)),
            recipes,
            resume=resume,
            parallel=chosen.parallel,
            on_run=on_run_of(start, on_run),
            callbacks=callbacks,
            on_end=lambda so_far: _write_results(folder / RESULTS, labelled(so_far)),
        )
    return Runs(labelled(summaries), folder)


def _write_results(path: Path, runs: list[Summary]) -> None:
    """Write the summaries so far, and the setting that is best on validation samples if there are any."""
    best = best_setting(runs)
    write_json(path, {"runs": runs} if best is None else {"runs": runs, "best": best.to_json()})


def holds_sweep(folder: str | Path) -> bool:
    """Return whether a folder holds a sweep, finished or not."""
    return (Path(folder) / SWEEP).exists()


def settings(sweep: Sweep) -> Iterator[Setting]:
    """Yield the distinct settings of a sweep: all combinations of the values, or `random` settings drawn by key."""
    choices = {path: _choices(path, values, sweep.random) for path, values in sweep.over.items()}
    if sweep.random is None:
        listed = [values for values in choices.values() if not isinstance(values, Range)]
        yield from (dict(zip(choices, values, strict=True)) for values in product(*listed))
        return
    drawn: dict[str, Setting] = {}
    for number in range(100 * sweep.random):  # draws are keyed by number: the first 20 of 40 settings are those of 20
        setting = {path: _draw(number, path, values) for path, values in choices.items()}
        drawn.setdefault(repr(setting), setting)
        if len(drawn) == sweep.random:
            break
    yield from drawn.values()


def label(setting: Setting, among: Iterable[Setting] = ()) -> str:
    """Return a setting as text, `mu=0.1 lr=0.01`: a field's last name, or its path if two fields share that name."""
    names = short_names({path for one in (setting, *among) for path in one})
    return " ".join(
        f"{names[path]}={short(value) if isinstance(value, str) else value}" for path, value in setting.items()
    )


def read_over(text: str) -> tuple[str, Any]:
    """Split `method.mu=0.01,0.1,1` into the field and its values."""
    path, equals, values = text.partition("=")
    if not equals or not values.strip() or not all(path.strip().split(".")):
        raise UserError(f"--over {text}: write field=value,value,… for example --over method.mu=0.01,0.1,1")
    return path.strip(), read_list(f"--over {text}", values)


def _names_of(path: str, values: Any) -> Any:
    """Replace objects among the values of a field by names."""
    if not isinstance(values, list | tuple):
        return values
    names = [named({path: value}) for value in values]
    for name in names:
        if len(name) > 1:
            raise UserError(
                f"sweep.over.{path}: an optimizer of torch.optim has its own learning rate; sweep over names of "
                "optimizers, or over objects with a function direction"
            )
    return [next(iter(name.values())) for name in names]


def _sweep(values: dict[str, Any], given: Mapping[str, Any]) -> Sweep:
    """Remove the `sweep` section from a recipe's values and return it, overridden by the given arguments."""
    section = values.pop("sweep", None) or {}
    if not isinstance(section, Mapping):
        raise UserError(f"sweep = {section!r}: must be a section with the fields {', '.join(Sweep.model_fields)}")
    own = {"seeds": [values["seed"]]} if "seed" in values else {}
    chosen = own | dict(section) | {name: what for name, what in given.items() if what is not None}
    if not chosen.get("over"):
        raise UserError("sweep.over is missing: name a field and its values, such as method.mu=0.01,0.1,1")
    for path in ("seed", "out"):
        if path in chosen["over"]:
            raise UserError(f"sweep.over.{path}: cannot be swept over; set sweep.seeds, such as 0,1,2")
    return checked(Sweep, chosen, "sweep")


def _choices(path: str, values: Any, random: int | None) -> list[Any] | Range:
    values = list(values) if isinstance(values, list | tuple) else [values]
    if not values:
        raise UserError(f"sweep.over.{path} = []: must have at least one value")
    ranges = [value for value in values if isinstance(value, str) and ".." in value and "/" not in value]
    if not ranges:
        return list({repr(value): value for value in values}.values())
    if len(values) > 1:
        raise UserError(f"sweep.over.{path} = {values!r}: must be a list of values or one range, not both")
    if random is None:
        raise UserError(
            f"sweep.over.{path} = '{ranges[0]}': values of a range are drawn at random; set the number of settings, "
            "such as sweep.random = 20, or list the values"
        )
    return _range(path, ranges[0])


def _range(path: str, text: str) -> Range:
    try:
        low, high = (float(end) if re.search(r"[.eE]", end) else int(end) for end in text.split("..", 1))
    except ValueError:
        raise UserError(f"sweep.over.{path} = '{text}': a range needs two numbers, as in 0.001..0.1") from None
    if not 0 < low < high < float("inf"):
        raise UserError(
            f"sweep.over.{path} = '{text}': a range is sampled log-uniformly and needs 0 < low < high; list the values "
            "instead, or change the range"
        )
    return Range(low, high)


def _draw(number: int, path: str, values: list[Any] | Range) -> Any:
    if isinstance(values, Range):
        return values.draw("sweep", number, path)
    return values[numpy_generator("sweep", number, path).integers(len(values))]


def _folder_name(setting: Setting, among: Iterable[Setting]) -> str:
    """Return a readable folder name for a setting, with a hash if characters had to be replaced or cut off."""
    name = label(setting, among).replace(" ", "_")
    safe = re.sub(r"[^\w.=+-]+", "-", name)[:100]
    return safe if safe == name and "" not in safe.split("=") else f"{safe}-{key(repr(setting)) % 16**6:06x}"
