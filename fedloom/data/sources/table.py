"""Tables: a `.csv` or `.parquet` file, or a folder with one such file per client."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding
from fedloom.data.from_arrays import coded

TABLES = (".csv", ".parquet")
LABELS = ("label", "target", "y")
"""Columns that are taken as the label unless `data.label` names one."""
LEVELS = 100
"""Maximum number of distinct texts in a column. More indicate names or identifiers."""
UNNAMED = "Unnamed: "
"""Start of the name that pandas gives to columns without one, such as an index that was saved with the table."""
COST = 20
"""Bytes of memory that one byte of a table can take while it is read."""
DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T\s].*)?")
REMEDY = "save it again"


def is_table(path: Path) -> bool:
    """Return whether a path is a table or a folder with tables directly inside."""
    return bool(table_files(path)) if path.is_dir() else path.suffix.lower() in TABLES


def table_files(folder: Path) -> list[Path]:
    """Return the tables directly inside a folder, sorted; hidden files are left out."""
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if file.suffix.lower() in TABLES)


def read_table(path: Path, label: str | None = None, client: str | None = None) -> Dataset:
    """Read a table of numbers and categories, or a folder with one table per client.

    Columns without a name are left out: they are usually row numbers. Numeric and boolean columns are inputs as they
    are. A column of texts becomes one input of 0 or 1 per distinct text (one-hot), in alphabetical order. If the tables
    of a folder are exactly `train` and `test`, they are the official split; otherwise each is a client with the name of
    its file.

    Args:
        path: The file or folder.
        label: Column of the label, whole numbers or texts; default: the only column called label, target or y.
        client: Column of the client (hospital, person, site), whose values become the groups of the dataset.

    Returns:
        The dataset, with inputs float32 [N, columns], named after the file or folder.

    Raises:
        UserError: A file is damaged, pandas is not installed, columns differ between files, a column is missing or has
            dates, missing values or too many distinct texts, or all labels are the same.
    """
    files = table_files(path) if path.is_dir() else [path]
    frames = [read_frame(file) for file in files]
    _same_columns(files, frames)
    stems = [file.stem for file in files]
    is_split = path.is_dir() and sorted(stems) == ["test", "train"]
    if client is not None and path.is_dir() and not is_split:
        raise UserError(f"data.client = '{client}': each file in '{path}' is a client; leave it out")
    if client is None and len(set(stems)) < len(stems):
        raise UserError(f"{path}: two files are called '{_repeated(stems)}'; rename one, since each is a client")
    frame = frames[0] if len(frames) == 1 else _pandas(path).concat(frames, ignore_index=True)
    if not len(frame):
        raise UserError(f"{path}: has no rows")
    label = label_column(path, list(frame.columns), label)
    if client is not None and (client not in frame.columns or client == label):
        raise UserError(f"data.client = '{client}': is not another column of {path}; it has {_few(frame.columns)}")
    if problems := table_problems(frame, label, client):
        raise UserError(f"{path}: {problems[0]}")
    inputs, levels = _encoded(frame, [name for name in frame.columns if name not in (label, client)], path)
    owners = np.repeat(np.arange(len(files)), [len(part) for part in frames])
    labels, classes = coded(path.stem, f"labels (column '{label}')", _values(frame[label]), len(frame))
    if len(classes) < 2:
        raise UserError(f"{path}: all labels in column '{label}' are {classes[0]!r}; at least two classes are needed")
    groups: torch.Tensor | None = None
    names: tuple[str, ...] = ()
    if client is not None:
        groups, names = coded(path.stem, f"clients (column '{client}')", _values(frame[client]), len(frame))
    elif path.is_dir() and not is_split:
        groups, names = torch.from_numpy(owners), tuple(stems)
    note = f"columns of texts became inputs of 0 or 1: {', '.join(levels)}"
    return Dataset(
        name=path.resolve().stem,
        inputs=torch.from_numpy(inputs),
        labels=labels,
        test=torch.from_numpy(is_split & (owners == stems.index("test")) if is_split else np.zeros(len(frame), bool)),
        classes=classes,
        groups=groups,
        group_names=names,
        notes=(note,) if levels else (),
    )


def read_frame(path: Path) -> Any:
    """Read one file with pandas.

    Raises:
        UserError: pandas is not installed, or the file is damaged or too large.
    """
    pandas = _pandas(path)
    if path.suffix.lower() == ".csv":
        with decoding(path, "a CSV table", REMEDY):
            refuse_without_room(COST * path.stat().st_size, str(path), "divide it, or leave out columns", "it")
            frame = pandas.read_csv(path, low_memory=False, na_values=["?"], skipinitialspace=True)
    else:
        with decoding(path, "a Parquet table", REMEDY):
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(path) as file:
                declared = file.metadata
                cells = declared.num_rows * declared.num_columns
                groups = range(declared.num_row_groups)
                size = max(8 * cells, sum(declared.row_group(i).total_byte_size for i in groups))
                refuse_without_room(3 * size, str(path), "divide it, or leave out columns", "it")
                table = file.read()
                table.validate(full=True)  # texts that are not UTF-8, lengths that do not fit
                frame = table.to_pandas()
    with decoding(path, "a table", REMEDY):
        frame.columns = [str(name) for name in frame.columns]
        for name in frame.columns:
            name.encode()
    if repeated := _repeated(list(frame.columns)):
        raise UserError(f"{path}: two columns are called '{repeated}'; rename one")
    return frame.drop(columns=[name for name in frame.columns if name.startswith(UNNAMED)]).reset_index(drop=True)


def label_column(path: Path, columns: Sequence[str], label: str | None) -> str:
    """Return the column of the label.

    Raises:
        UserError: The named column does not exist, or none is named and not exactly one has a usual name.
    """
    if label is not None:
        if label not in columns:
            raise UserError(f"data.label = '{label}': is not a column of {path}; it has {_few(columns)}")
        return label
    usual = [name for name in columns if name.lower() in LABELS]
    if len(usual) != 1:
        raise UserError(
            f"{path}: {'no column is' if not usual else f'{len(usual)} columns are'} called {', '.join(LABELS)}; name "
            f"the column of the label, for example data.label={columns[-1] if columns else 'LABEL'} (columns: "
            f"{_few(columns)})"
        )
    return usual[0]


def table_problems(frame: Any, label: str, client: str | None) -> list[str]:
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
        found.append(f"columns {_few(dates)} have dates; replace them by numbers, such as days, or drop them")
    if others:
        found.append(f"columns {_few(others)} have neither numbers nor texts; convert or drop them")
    if many:
        found.append(f"columns {_few(many)} have more than {LEVELS} distinct texts; group or drop them")
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


def _encoded(frame: Any, columns: Sequence[str], path: Path) -> tuple[np.ndarray, list[str]]:
    """Return the inputs, and a description of each column of texts."""
    parts, levels = [], []
    for name in columns:
        if _kind(frame[name]) == "numbers":
            with np.errstate(over="ignore"):  # `Dataset` refuses the infinities that this makes
                parts.append(np.asarray(frame[name].to_numpy(), np.float64).astype(np.float32)[:, None])
            continue
        codes, found = coded(path.stem, f"column '{name}'", _values(frame[name]), len(frame))
        parts.append(np.eye(len(found), dtype=np.float32)[codes.numpy()])
        levels.append(f"{name} ({', '.join(found[:5])}{', …' if len(found) > 5 else ''})")
    refuse_without_room(2 * sum(part.nbytes for part in parts), str(path), "leave out columns", "it")
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), levels


def _values(column: Any) -> np.ndarray:
    """Return a column's labels or texts as an array that NumPy can sort."""
    if column.dtype.kind in "biuf":
        return np.asarray(column.to_numpy())
    return np.asarray([str(value) for value in column], dtype=str)


def _same_columns(files: Sequence[Path], frames: Sequence[Any]) -> None:
    for file, frame in zip(files, frames, strict=True):
        if set(frame.columns) != set(frames[0].columns):
            name = sorted(set(frame.columns) ^ set(frames[0].columns))[0]
            raise UserError(f"{file}: differs from {files[0]} in column '{name}'; all files must have the same columns")


def _repeated(names: Sequence[str]) -> str:
    return next((name for place, name in enumerate(names) if name in names[:place]), "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")


def _pandas(path: Path) -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: reading tables needs pandas and pyarrow; pip install 'fedloom[tables]'") from error
    return pandas
