"""Results of a sweep: a table and a plot (a curve for one field, a heat map for two)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedloom.config.loading import SHORT
from fedloom.experiment.records import Summary, measure
from fedloom.experiment.selection import best_of, field_of
from fedloom.report.federation_plot import COLOURS, GREY, INK, PAPER
from fedloom.report.significance import sample_std
from fedloom.report.table import percent

SCORES = {"personal_accuracy": "clients %", "global_accuracy": "global %"}
NOTE = (
    "these are accuracies on test data, without a validation split: a setting chosen by them is chosen on test data. "
    "Report all settings, or choose by separate runs (with another data.seed) from those you report. With validation "
    "samples, for example --set data.split=pooled:0.6:0.2, a sweep names the best setting"
)


COMPARABLE = ("data.augment", "data.views", "data.normalise", "data.resample")
"""Fields of `data` that do not change the validation samples; settings that differ in others are not compared."""
DIFFERENT = (
    "the settings differ in {}, so their results on validation samples cannot be compared and none is the best: sweep "
    "over it separately"
)
UNSCALED = (field_of("loss"),)
"""Validation results that are no shares, and so not shown in percent."""
Setting = dict[str, Any]
"""A value for each swept field."""


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Map each field path to its last component (`training.optimizer.lr` → `lr`) where that is unambiguous."""
    paths = list(paths)
    leaves = {path: path.removesuffix(".name").rpartition(".")[2] for path in paths}
    return {path: leaf if list(leaves.values()).count(leaf) == 1 else path for path, leaf in leaves.items()}


def by_setting(runs: Sequence[Summary]) -> list[tuple[Setting, list[Summary]]]:
    """Group runs by setting; a group has one run per seed."""
    groups: dict[str, list[Summary]] = {}
    for run in runs:
        groups.setdefault(repr(run["setting"]), []).append(run)
    return [(group[0]["setting"], group) for group in groups.values()]


@dataclass(frozen=True)
class Best:
    """The setting that is best on validation samples."""

    setting: Setting
    by: str
    """The field of the summaries that was compared."""
    value: float
    """Its mean over seeds."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dictionary."""
        return asdict(self)


def best_setting(runs: Sequence[Summary]) -> Best | None:
    """Return the setting with the best mean over seeds on validation samples, the first of equals.

    None if nothing may be chosen: a run has no validation samples, or settings differ in data or measure.
    """
    measures = {run.get("measure") for run in runs}
    if any(run.get("best_by") != "validation" for run in runs) or len(measures) != 1 or _other_samples(runs):
        return None
    name = str(measures.pop())
    means = [(setting, _mean([measure(run, field_of(name)) for run in group])) for setting, group in by_setting(runs)]
    setting = best_of(means, name)
    if setting is None:
        return None
    value = next(mean for other, mean in means if other is setting)
    assert value is not None
    return Best(setting, field_of(name), value)


def _other_samples(runs: Sequence[Summary]) -> list[str]:
    """Return the swept fields that change which samples, or what of them, is compared."""
    paths = {path: SHORT.get(path, path) for run in runs for path in run["setting"]}
    return [
        path
        for path, full in paths.items()
        if (full.startswith("data.") and full not in COMPARABLE) or full in ("evaluation.clients", "evaluation.measure")
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown, since a setting that failed with a seed must not win by another."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def choice(runs: Sequence[Summary], best: Best | None) -> str:
    """Return what a sweep says about the choice of a setting: the best one by validation, or why there is none."""
    if best is None:
        other = _other_samples(runs) if any(run.get("best_by") == "validation" for run in runs) else []
        return DIFFERENT.format(", ".join(other)) if other else NOTE
    setting = " ".join(f"{name}={best.setting[path]}" for path, name in short_names(best.setting).items())
    group = next(group for setting, group in by_setting(runs) if setting == best.setting)
    tested = {label: percent([measure(run, name) for run in group]) for name, label in SCORES.items()}
    found = ", ".join(f"{label.removesuffix(' %')} {value}%" for label, value in tested.items() if value != "–")
    field = best.by.removeprefix("validation_")
    known = [value for run in group if (value := measure(run, field)) is not None]
    more = f", {field} {np.mean(known):.4g}" if known and field not in SCORES else ""
    return f"best by {best.by}: {setting} ({best.value:.4g}); report its test accuracy: {found}{more}"


def sweep_table(runs: Sequence[Summary]) -> Table:
    """Return the table of a sweep, one row per setting; accuracies in percent, ±: sample deviation over seeds.

    With validation samples there is a column of validation results, and the best setting is marked with an asterisk.
    """
    seeds = len({run["seed"] for run in runs})
    caption = f"clients: mean accuracy over clients · spread: std over clients · ±: sample std over {seeds} seeds"
    table = Table(caption=caption if seeds > 1 else caption.rpartition(" · ")[0])
    for name in short_names(runs[0]["setting"]).values():
        table.add_column(name, style="bold", overflow="fold")
    for name in (SCORES["personal_accuracy"], "spread", "worst tenth", SCORES["global_accuracy"], "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    best = best_setting(runs)
    if best is not None:
        table.add_column("valid." if best.by in UNSCALED else "valid. %", justify="right", no_wrap=True)
        table.caption = f"{table.caption} · valid.: {best.by}, * marks the best setting"
    for setting, group in by_setting(runs):
        validation = []
        if best is not None:
            value = _validation([measure(run, best.by) for run in group], percentage=best.by not in UNSCALED)
            validation = [f"{value} *" if setting == best.setting else f"{value}  "]
        table.add_row(
            *map(str, setting.values()),
            percent([run["personal_accuracy"] for run in group]),
            percent([run["personal_std"] for run in group], spread=False),
            percent([run["personal_worst"] for run in group], spread=False),
            percent([run["global_accuracy"] for run in group]),
            f"{np.mean([run['seconds'] for run in group]):.1f}",
            *validation,
        )
    return table


def _validation(values: list[float | None], *, percentage: bool) -> str:
    """Format the validation results of a setting, in percent unless they are losses."""
    if percentage:
        return percent(values, spread=False)
    mean = _mean(values)
    return "–" if mean is None else f"{mean:.4f}"


def plot_sweep(runs: Sequence[Summary], path: Path | str) -> None:
    """Write a PNG of a sweep.

    One field gives a curve. Two fields give a heat map, or coloured dots if not all combinations were run. More fields
    give one scatter plot per field.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = by_setting(runs)
    fields = list(groups[0][0])
    scores = {score: label for score, label in SCORES.items() if any(measure(run, score) is not None for run in runs)}
    across = len(fields) if len(fields) > 2 else 1
    figure = Figure(figsize=(5.2 * across * len(scores), 4.2), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = iter(figure.subplots(1, across * len(scores), squeeze=False)[0])
    names = short_names(fields)
    for score, label in scores.items():
        found = [
            (setting, *_mean_std([100 * value for run in group if (value := measure(run, score)) is not None]))
            for setting, group in groups
        ]
        if len(fields) == 2:
            _draw_map(figure, next(axes), found, fields, names, label)
        else:
            for field in fields:
                _draw_curve(next(axes), found, field, names[field], label, line=len(fields) == 1)
    figure.savefig(path, dpi=160)


Found = list[tuple[Setting, float, float]]


def _mean_std(values: list[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation, 0 for a single value."""
    return (float(np.mean(values)), sample_std(values)) if values else (float("nan"), 0.0)


def _draw_curve(axes: Any, found: Found, field: str, name: str, label: str, *, line: bool) -> None:
    values = [setting[field] for setting, *_ in found]
    x, ticks = _positions(values)
    order = np.argsort(x, kind="stable") if line else np.arange(len(x))
    mean, std = np.array([m for _, m, _ in found]), np.array([s for *_, s in found])
    style = {"fmt": "o-" if line and _are_numbers(values) else "o", "color": COLOURS[0], "ecolor": GREY, "capsize": 3}
    axes.errorbar(x[order], mean[order], std[order], **style)
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), ticks)
    elif _wide(x):
        axes.set_xscale("log")
    axes.set_xlabel(name, color=INK)
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_map(figure: Any, axes: Any, found: Found, fields: list[str], names: dict[str, str], label: str) -> None:
    rows, columns = ([setting[field] for setting, *_ in found] for field in fields)
    across, down = _distinct(columns), _distinct(rows)
    if len(found) != len(across) * len(down):
        _draw_dots(figure, axes, found, fields, names, label)
        return
    grid = np.full((len(down), len(across)), np.nan)
    for setting, mean, _ in found:
        grid[down.index(setting[fields[0]]), across.index(setting[fields[1]])] = mean
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2 if np.isfinite(grid).any() else 0
    for (i, j), value in np.ndenumerate(grid):
        colour = PAPER if value <= middle else INK
        axes.text(j, i, f"{value:.1f}" if np.isfinite(value) else "–", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(across)), map(str, across))
    axes.set_yticks(range(len(down)), map(str, down))
    axes.set_xlabel(names[fields[1]], color=INK)
    axes.set_ylabel(names[fields[0]], color=INK)
    figure.colorbar(image, ax=axes, label=label)


def _draw_dots(figure: Any, axes: Any, found: Found, fields: list[str], names: dict[str, str], label: str) -> None:
    for field, axis in zip(fields, ("y", "x"), strict=True):
        positions, ticks = _positions([setting[field] for setting, *_ in found])
        if ticks is not None:
            getattr(axes, f"set_{axis}ticks")(range(len(ticks)), ticks)
        elif _wide(positions):
            getattr(axes, f"set_{axis}scale")("log")
        getattr(axes, f"set_{axis}label")(names[field], color=INK)
    y, x = (_positions([setting[field] for setting, *_ in found])[0] for field in fields)
    dots = axes.scatter(x, y, c=[mean for _, mean, _ in found], cmap="cividis", s=90, edgecolors=INK, linewidths=0.5)
    figure.colorbar(dots, ax=axes, label=label)


def _positions(values: list[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Return positions on an axis: numbers unchanged; other values as indices, with their tick labels.

    Numbers that neither a linear nor a logarithmic axis separates (0, 0.1, 1, 10) are indices in ascending order too.
    """
    distinct = _distinct(values)
    if _are_numbers(values):
        numbers = np.array(values, float)
        if _wide(numbers) or _separate(numbers):
            return numbers, None
        distinct.sort()
    return np.array([distinct.index(value) for value in values], float), list(map(str, distinct))


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _distinct(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _separate(values: np.ndarray) -> bool:
    """Whether a linear axis shows all numbers apart: neighbours differ by at least a thirtieth of the range."""
    gaps = np.diff(np.unique(values))
    return not len(gaps) or bool(gaps.min() >= gaps.sum() / 30)


def _wide(values: np.ndarray) -> bool:
    return bool(values.min() > 0 and values.max() / values.min() >= 20)
