"""Runs arranged in rows and columns for a paper: which runs belong to one cell."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config.loading import SHORT, flat, is_free
from fedloom.core.errors import UserError
from fedloom.core.registry import short
from fedloom.report.page.runs import Run, read_runs

METHOD, DATA = "method.name", "data.name"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """Runs by row and column, sorted by seed; the runs of a cell differ only in the seed."""

    rows: list[str]
    columns: list[str]
    """Labels of the columns; one empty label if there is a single column."""
    cells: dict[tuple[str, str], list[Run]]

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for runs in self.cells.values() for run in runs]


def finished_runs(paths: Iterable[Path], seeds: Sequence[int] | None = None) -> list[Run]:
    """Read the runs in some folders, of some seeds.

    Raises:
        UserError: A folder holds no run, a run is not finished, or no run has one of the seeds.
    """
    runs = read_runs(paths)
    for seed in seeds or ():
        if all(run.seed != seed for run in runs):
            known = ", ".join(map(str, sorted({run.seed for run in runs})))
            raise UserError(f"seeds: no run has the seed {seed}; choose among {known}")
    runs = [run for run in runs if not seeds or run.seed in seeds]
    for run in runs:
        if run.done is None:
            raise UserError(
                f"'{run.path}' is not finished ({len(run.history)} of {run.rounds} rounds); finish it with `fedloom "
                f"resume {run.path}`, or leave it out"
            )
    return runs


def arrange(runs: Sequence[Run], rows: Sequence[str] = (), columns: Sequence[str] | None = None) -> Grid:
    """Arrange runs in rows and columns.

    Args:
        runs: The runs.
        rows: Recipe fields that distinguish rows. Default: the method, and the settings that differ between runs of
            one method in one column.
        columns: Recipe fields that distinguish columns. Default: `data.name` if it differs.

    Raises:
        UserError: No run has a field, or a cell would mix runs that differ in more than the seed.
    """
    settings = {run.path: _settings(run) for run in runs}
    if columns is None:
        columns = [DATA] if len({repr(found.get(DATA)) for found in settings.values()}) > 1 else []
    columns = [_field("columns", name, settings.values()) for name in columns]
    down = [_field("rows", name, settings.values()) for name in rows]
    place = {run.path: _key(settings[run.path], columns) for run in runs}
    fields = {run.path: down or [METHOD] for run in runs}
    if not down:
        same: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            same[repr(settings[run.path][METHOD])].append(run)
        for group in same.values():
            differing = _differing_by_place(group, settings, place)
            fields |= {run.path: [METHOD, *(name for name in differing if name not in columns)] for run in group}
    row_of = _labels(runs, settings, lambda run: fields[run.path])
    column_of = _labels(runs, settings, lambda run: columns)
    cells: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        cells[row_of[run.path], column_of[run.path]].append(run)
    for where, cell in cells.items():
        _refuse_mixed(where, cell, settings, rows)
        cell.sort(key=lambda run: run.seed)
    return Grid(list(dict.fromkeys(row_of.values())), list(dict.fromkeys(column_of.values())), dict(cells))


def _settings(run: Run) -> Settings:
    """Return the fields of a recipe that affect results, without the seed."""
    return {name: value for name, value in flat(run.recipe) if name != "seed" and not is_free(name)}


def _field(where: str, name: str, settings: Iterable[Settings]) -> str:
    settings = list(settings)
    for path in (name, SHORT.get(name, name), f"{name}.name"):
        if any(path in found for found in settings):
            return path
    differing = ", ".join(_differing(settings)) or "none"
    raise UserError(f"{where}: no run's recipe has a field '{name}'; fields that differ between the runs: {differing}")


def _differing(settings: Sequence[Settings]) -> list[str]:
    names = dict.fromkeys(name for found in settings for name in found)
    return [name for name in names if len({repr(found.get(name)) for found in settings}) > 1]


def _differing_by_place(
    group: Sequence[Run], settings: Mapping[Path, Settings], place: Mapping[Path, str]
) -> list[str]:
    """Return the settings that differ between runs of one method in any one column."""
    columns: dict[str, list[Settings]] = defaultdict(list)
    for run in group:
        columns[place[run.path]].append(settings[run.path])
    return list(dict.fromkeys(name for found in columns.values() for name in _differing(found)))


def _key(settings: Settings, fields: Sequence[str]) -> str:
    return repr([settings.get(name) for name in fields])


def _labels(
    runs: Sequence[Run], settings: Mapping[Path, Settings], fields: Callable[[Run], Sequence[str]]
) -> dict[Path, str]:
    """Return the label of each run by the values of some fields; with full paths where short labels coincide."""
    labels = {run.path: " ".join(_short(name, settings[run.path].get(name)) for name in fields(run)) for run in runs}
    full = {
        run.path: " ".join(f"{name}={settings[run.path].get(name)}" for name in fields(run)) for run in runs
    }  # fmt: skip
    meanings: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        meanings[labels[run.path]].add(full[run.path])
    return {path: label if len(meanings[label]) == 1 else full[path] for path, label in labels.items()}


def _short(name: str, value: Any) -> str:
    """Return a value for a heading: names and other texts alone, numbers with the last part of the field's path."""
    if name.endswith(".name") or name == "data.partition":
        return short(str(value))
    return f"{name.rpartition('.')[2]}={value}"


def _refuse_mixed(
    where: tuple[str, str], cell: Sequence[Run], settings: Mapping[Path, Settings], rows: Sequence[str]
) -> None:
    title = ", ".join(filter(None, where))
    if differing := _differing([settings[run.path] for run in cell]):
        raise UserError(
            f"rows = {', '.join(rows)}: '{title}' mixes runs that differ in {', '.join(differing)}; add it to rows or "
            "columns, or give fewer run folders"
        )
    seen: dict[int, Path] = {}
    for run in cell:
        if run.seed in seen:
            raise UserError(
                f"'{seen[run.seed]}' and '{run.path}' are the same run ({title}, seed {run.seed}), which would count "
                "twice; leave one out"
            )
        seen[run.seed] = run.path
