"""Inputs from pandas frames: numbers as they are, texts as inputs of 0 or 1."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.data.coding import coded

LABELS = ("label", "labels", "target", "class", "y")
"""Columns that are taken as the label unless one is named."""
LEVELS = 100
"""Maximum number of distinct texts in a column. More indicate names or identifiers."""
DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T\s].*)?")


def as_pandas(thing: Any) -> Any | None:
    """Return a pandas frame (of a frame, a series, or a polars frame), or None if the object is none of these."""
    if not hasattr(thing, "to_numpy"):
        return None
    if hasattr(thing, "to_pandas"):
        thing = thing.to_pandas()
    thing = thing.to_frame() if hasattr(thing, "to_frame") else thing
    return thing.set_axis([str(name) for name in thing.columns], axis=1) if hasattr(thing, "columns") else None


def inputs_of(frame: Any, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return all columns of a pandas frame as inputs, and notes, as `encoded` does.

    Raises:
        UserError: Values are missing, or a column has neither numbers nor a few distinct texts.
    """
    where = f"dataset '{name}'"
    refuse_repeated(list(frame.columns), where)
    if not len(frame):
        raise UserError(f"{where}: it has no samples")
    if problems := frame_problems(frame):
        raise UserError(f"{where}: {problems[0]}")
    return encoded(frame, list(frame.columns), name, where)


def label_column(columns: Sequence[str], label: str | None, where: str, remedy: str) -> str:
    """Return the column of the label.

    Args:
        columns: The columns of a table.
        label: The column that the user names, if any.
        where: The table, for errors: a path or `dataset 'frame'`.
        remedy: How to name the column.

    Raises:
        UserError: The named column does not exist, or none is named and not exactly one has a usual name.
    """
    if label is not None:
        if label not in columns:
            raise UserError(f"data.label = '{label}': is not a column of {where}; it has {few(columns)}")
        return label
    usual = [name for name in columns if name.lower() in LABELS]
    if len(usual) != 1:
        raise UserError(
            f"{where}: {'no column is' if not usual else f'{len(usual)} columns are'} called {', '.join(LABELS)}; name "
            f"the column of the label, for example {remedy} (columns: {few(columns)})"
        )
    return usual[0]


def refuse_repeated(columns: Sequence[str], where: str) -> None:
    """Raise a UserError if two columns have the same name."""
    if repeated := repeated_name(columns):
        raise UserError(f"{where}: two columns are called '{repeated}'; rename one")


def frame_problems(frame: Any, label: str | None = None, client: str | None = None) -> list[str]:
    """Return everything about the columns that a run refuses, each with its remedy."""
    found = []
    missing = {name: int(frame[name].isna().sum()) for name in frame.columns}
    if missing := {name: count for name, count in missing.items() if count}:
        counts = ", ".join(f"{name} ({count:,})" for name, count in list(missing.items())[:20])
        more = f" and {len(missing) - 20} more columns" if len(missing) > 20 else ""
        found.append(f"values are missing in {counts}{more}; fill them, or drop the rows or columns")
    inputs = [name for name in frame.columns if name not in (label, client)]
    if not inputs:
        found.append("has no columns besides the label; add the inputs")
    dates, others, many = [], [], []
    for name in inputs:
        kind = _kind(frame[name])
        if kind == "dates":
            dates.append(name)
        elif kind == "others":
            others.append(f"{name} ({frame[name].dtype})")
        elif kind == "texts" and (count := int(frame[name].nunique())) > LEVELS:
            many.append(f"{name} ({count:,})")
    if dates:
        found.append(f"columns {few(dates)} have dates; replace them by numbers, such as days, or drop them")
    if others:
        found.append(f"columns {few(others)} have neither numbers nor texts; convert or drop them")
    if many:
        found.append(f"columns {few(many)} have more than {LEVELS} distinct texts; group or drop them")
    return found


def _kind(column: Any) -> str:
    """Return `numbers`, `texts`, `dates` or `others`."""
    if column.dtype.kind in "biuf":
        return "numbers"
    if column.dtype.kind in "mM":
        return "dates"
    values = column.dropna()
    if not len(values):
        return "numbers"
    if all(isinstance(value, str) for value in values):
        return "dates" if all(DATE.fullmatch(value) for value in values) else "texts"
    return "texts" if all(isinstance(value, str | bool | int | np.bool_ | np.integer) for value in values) else "others"


def encoded(frame: Any, columns: Sequence[str], name: str, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return columns as inputs.

    Args:
        frame: A frame without problems (`frame_problems`).
        columns: The columns, in order.
        name: Name of the dataset, for errors.
        where: The table, for errors.

    Returns:
        float32 [N, inputs], in which a column of texts is one input of 0 or 1 per distinct text, in alphabetical order;
        and a note that names the columns of texts, if there are any.
    """
    parts, levels = [], []
    for column in columns:
        if _kind(frame[column]) == "numbers":
            with np.errstate(over="ignore"):  # `Dataset` refuses the infinities that this makes
                parts.append(np.asarray(frame[column].to_numpy(), np.float64).astype(np.float32)[:, None])
            continue
        codes, found = coded(name, f"column '{column}'", column_values(frame[column]), len(frame))
        parts.append(np.eye(len(found), dtype=np.float32)[codes.numpy()])
        levels.append(f"{column} ({', '.join(found[:5])}{', …' if len(found) > 5 else ''})")
    refuse_without_room(2 * sum(part.nbytes for part in parts), where, "leave out columns", "it")
    note = f"columns of texts became inputs of 0 or 1: {', '.join(levels)}"
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), (note,) if levels else ()


def column_values(column: Any) -> np.ndarray:
    """Return a column's labels or texts as an array that NumPy can sort."""
    if column.dtype.kind in "biuf":
        return np.asarray(column.to_numpy())
    return np.asarray([str(value) for value in column], dtype=str)


def repeated_name(names: Sequence[str]) -> str:
    """Return the first name that occurs twice, or an empty text."""
    known: set[str] = set()
    for name in names:
        if name in known:
            return name
        known.add(name)
    return ""


def few(names: Sequence[str]) -> str:
    """Return the first names, and the number of all."""
    return ", ".join(list(names)[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
