"""Differences between two runs: recipe, versions, data and figures."""

import re
from pathlib import Path
from typing import Any, TypedDict

from fedloom.config.loading import flat
from fedloom.core.errors import UserError, shown
from fedloom.experiment.run_folder import TASK, holds_run, read_facts
from fedloom.report.page.runs import Run, read_run

HASH = re.compile(r"\b[0-9a-f]{64}\b")
Pair = tuple[Any, Any]


class Differences(TypedDict):
    """What differs, by name: the values of the first and the second run, None where a run has none."""

    recipe: dict[str, Pair]
    versions: dict[str, Pair]
    data: dict[str, Pair]
    figures: dict[str, Pair]


def differences(first: Path, second: Path) -> Differences:
    """Compare two run folders, finished or not.

    Raises:
        UserError: A folder holds no run, or a file in it cannot be read.
    """
    one, other = _read(first), _read(second)
    return {
        "recipe": _differing(dict(flat(one.recipe)), dict(flat(other.recipe))),
        "versions": _differing(one.versions, other.versions),
        "data": _differing(_facts(first), _facts(second)),
        "figures": _differing(_figures(one), _figures(other)),
    }


def brief_value(value: Any) -> str:
    """Return a value as text for a table: six digits of a fraction, twelve of a hash; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and (hashed := HASH.search(value)):
        value = f"{value[: hashed.start()]}{hashed[0][:12]}…{value[hashed.end() :]}"
    return shown(value)


def _read(folder: Path) -> Run:
    if not holds_run(folder):
        raise UserError(f"RUN = '{folder}': holds no run; name a single run's folder, not that of a comparison")
    return read_run(folder)


def _facts(folder: Path) -> dict[str, Any]:
    return dict(read_facts(folder)) if (folder / TASK).exists() else {}


def _figures(run: Run) -> dict[str, Any]:
    numbers = {name: value for name, value in flat(dict(run.summary)) if isinstance(value, int | float)}
    return {"state": run.state, "rounds": len(run.history), **numbers}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Pair]:
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}
