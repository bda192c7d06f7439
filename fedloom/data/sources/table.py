"""Tables: a `.csv` or `.parquet` file, or a folder with one such file per client."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding
from fedloom.data.coding import coded
from fedloom.data.frames import (
    column_values,
    encoded,
    few,
    frame_problems,
    label_column,
    refuse_repeated,
    repeated_name,
)

TABLES = (".csv", ".parquet")
UNNAMED = "Unnamed: "
"""Start of the name that pandas gives to columns without one, such as an index that was saved with the table."""
COST = 20
"""Bytes of memory that one byte of a table can take while it is read."""
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
        label: Column of the label, whole numbers or texts; default: the only one with a usual name (`LABELS`).
        client: Column of the client (hospital, person, site), whose values become the groups of the dataset.

    Returns:
        The dataset, with inputs float32 [N, columns], named after the file or folder.

    Raises:
        UserError: A file is damaged, columns differ between files, a column is missing or has
            dates, missing values or too many distinct texts, or all labels are the same.
    """
    import pandas

    files = table_files(path) if path.is_dir() else [path]
    frames = [read_frame(file) for file in files]
    _same_columns(files, frames)
    stems = [file.stem for file in files]
    is_split = path.is_dir() and sorted(stems) == ["test", "train"]
    if client is not None and path.is_dir() and not is_split:
        raise UserError(f"data.client = '{client}': each file in '{path}' is a client; leave it out")
    if client is None and len(set(stems)) < len(stems):
        raise UserError(f"{path}: two files are called '{repeated_name(stems)}'; rename one, since each is a client")
    frame = frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True)
    if not len(frame):
        raise UserError(f"{path}: has no rows")
    label = label_of(path, list(frame.columns), label)
    if client is not None and (client not in frame.columns or client == label):
        raise UserError(f"data.client = '{client}': is not another column of {path}; it has {few(frame.columns)}")
    if problems := frame_problems(frame, label, client):
        raise UserError(f"{path}: {problems[0]}")
    columns = [name for name in frame.columns if name not in (label, client)]
    inputs, notes = encoded(frame, columns, path.stem, str(path))
    owners = np.repeat(np.arange(len(files)), [len(part) for part in frames])
    labels, classes = coded(path.stem, f"labels (column '{label}')", column_values(frame[label]), len(frame))
    if len(classes) < 2:
        raise UserError(f"{path}: all labels in column '{label}' are {classes[0]!r}; at least two classes are needed")
    groups: torch.Tensor | None = None
    names: tuple[str, ...] = ()
    if client is not None:
        groups, names = coded(path.stem, f"clients (column '{client}')", column_values(frame[client]), len(frame))
    elif path.is_dir() and not is_split:
        groups, names = torch.from_numpy(owners), tuple(stems)
    return Dataset(
        name=path.resolve().stem,
        inputs=torch.from_numpy(inputs),
        labels=labels,
        test=torch.from_numpy(is_split & (owners == stems.index("test")) if is_split else np.zeros(len(frame), bool)),
        classes=classes,
        groups=groups,
        group_names=names,
        notes=notes,
    )


def read_frame(path: Path) -> Any:
    """Read one file with pandas.

    Raises:
        UserError: The file is damaged or too large, or pyarrow, which reads .parquet, is not installed.
    """
    import pandas

    if path.suffix.lower() == ".csv":
        with decoding(path, "a CSV table", REMEDY):
            refuse_without_room(COST * path.stat().st_size, str(path), "divide it, or leave out columns", "it")
            frame = pandas.read_csv(path, low_memory=False, na_values=["?"], skipinitialspace=True)
    else:
        parquet = need_pyarrow(path)
        with decoding(path, "a Parquet table", REMEDY), parquet.ParquetFile(path) as file:
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
    refuse_repeated(list(frame.columns), str(path))
    return frame.drop(columns=[name for name in frame.columns if name.startswith(UNNAMED)]).reset_index(drop=True)


def label_of(path: Path, columns: Sequence[str], label: str | None) -> str:
    """Return the column of the label of a table in files.

    Raises:
        UserError: The named column does not exist, or none is named and not exactly one has a usual name.
    """
    return label_column(columns, label, str(path), f"data.label={columns[-1] if columns else 'LABEL'}")


def _same_columns(files: Sequence[Path], frames: Sequence[Any]) -> None:
    for file, frame in zip(files, frames, strict=True):
        if set(frame.columns) != set(frames[0].columns):
            name = sorted(set(frame.columns) ^ set(frames[0].columns))[0]
            raise UserError(f"{file}: differs from {files[0]} in column '{name}'; all files must have the same columns")


def need_pyarrow(path: Path) -> Any:
    """Return the package that reads Parquet files.

    Raises:
        UserError: It is not installed.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"{path}: reading .parquet needs pyarrow; pip install 'fedloom[tables]'") from error
    return parquet
