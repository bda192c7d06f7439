"""Datasets from any of the objects that `fedloom.run(data=…)` takes."""

from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data.frames import as_pandas, frame_problems, label_column, refuse_repeated
from fedloom.data.from_arrays import from_arrays
from fedloom.data.from_clients import from_clients, from_splits, has_items, is_split
from fedloom.data.from_torch import from_torch


def from_frame(frame: Any, *, label: str | None = None, client: str | None = None, name: str = "frame") -> Dataset:
    """Make a dataset of a pandas (or polars) frame with a column of labels.

    Args:
        frame: The frame. Numbers are inputs as they are; a column of texts or categories becomes one input of 0 or 1
            per distinct value, and a note of the dataset lists them.
        label: The column of labels. Default: the only one called label, labels, target, class or y.
        client: The column of the client (hospital, person, site), whose values become the groups of the dataset.
        name: Name of the dataset, for reports and messages.

    Returns:
        The dataset; its inputs are all other columns, in order.

    Raises:
        UserError: The column of labels is not clear, values are missing, or a column has neither numbers nor a few
            distinct texts.

    Example:
        >>> from_frame(frame, label="diagnosis", client="hospital")   # doctest: +SKIP
    """
    where = f"dataset '{name}'"
    table = as_pandas(frame)
    if table is None:
        raise UserError(f"{where}: a {type(frame).__name__} is not a frame")
    columns = list(table.columns)
    refuse_repeated(columns, where)
    label = label_column(columns, label, where, "fedloom.data.from_frame(frame, label=NAME)")
    if client is not None and (client not in columns or client == label):
        raise UserError(f"client = '{client}': is not another column of {where}")
    if problems := frame_problems(table, label, client):
        raise UserError(f"{where}: {problems[0]}")
    inputs = table[[column for column in columns if column not in (label, client)]]
    return from_arrays(inputs, table[label], groups=None if client is None else table[client], name=name)


def as_dataset(thing: Any) -> Dataset:
    """Make a dataset of any of the objects that `fedloom.run(data=…)` takes.

    Args:
        thing: A `Dataset`, a pair (x, y), a frame with a column of labels, a PyTorch dataset, a list of samples (input,
            label), a Hugging Face dataset, `{"train": …, "test": …}` of these, or a mapping of client names to these,
            or a list with one per client.

    Raises:
        UserError: The object is none of these.
    """
    if isinstance(thing, Dataset):
        return thing
    if isinstance(thing, Mapping):
        return from_splits(thing) if is_split(thing) else from_clients(thing)
    if isinstance(thing, tuple) and len(thing) == 2 and not all(map(_is_pair, thing)):
        return from_arrays(*thing)
    if isinstance(thing, list) and thing and all(map(_is_sample, thing)):
        return from_torch(thing, name="samples")
    if isinstance(thing, list) and thing and all(map(_is_source, thing)):
        return from_clients(thing)
    if isinstance(thing, list) and len(thing) == 2:
        return from_arrays(*thing)
    if as_pandas(thing) is not None:
        return from_frame(thing)
    if hasattr(thing, "dataset") and hasattr(thing, "batch_size"):
        raise UserError(f"data: a {type(thing).__name__} gives batches; give its dataset")
    if has_items(thing):
        return from_torch(thing)
    raise UserError(f"data: {_described(thing)}")


def is_data(thing: Any) -> bool:
    """Return whether a value is an object with data, rather than a name or a recipe section."""
    if isinstance(thing, Mapping):
        return bool(thing) and "name" not in thing and all(map(_is_source, thing.values()))
    return not isinstance(thing, str | Path)


def refuse_arrays(fields: Mapping[str, Any]) -> None:
    """Raise a UserError if a mapping that stands for a recipe section holds arrays."""
    if arrays := [name for name, value in fields.items() if _is_array(value)]:
        raise UserError(
            f"data.{arrays[0]}: an array is not a field of a recipe; give data=(x, y), and for several clients "
            '{"north": (x, y), …}, with inputs and labels of each'
        )


def _is_array(thing: Any) -> bool:
    return getattr(thing, "ndim", 0) > 0 and not isinstance(thing, type)


def _described(thing: Any) -> str:
    """Return why an object cannot be used as data, and what to give instead."""
    if isinstance(thing, tuple) and len(thing) == 2:
        return 'a pair of tuples is not clear; give {"train": (x, y), "test": (x, y)}, or a list with (x, y) per client'
    kind = f"an object of type {type(thing).__name__}"
    if isinstance(thing, Iterable) and not isinstance(thing, Sized | type):
        return f"{kind} has no length; give a list of its samples, each a pair (input, label)"
    if hasattr(thing, "__getitem__") and not isinstance(thing, Sized | type):
        return f"{kind} has no length; add a method __len__, which returns the number of samples"
    length = f" with {len(thing)} entries" if isinstance(thing, tuple | list) else ""
    return (
        f"{kind}{length} cannot be used; give a name, a pair (x, y), a frame, a PyTorch dataset, a "
        'fedloom.data.Dataset, {"train": …, "test": …} of these, or a mapping of client names to these'
    )


def _is_pair(thing: Any) -> bool:
    """Return whether an object is a tuple of inputs and labels."""
    return isinstance(thing, tuple) and len(thing) == 2 and all(map(_has_length, thing))


def _is_sample(thing: Any) -> bool:
    """Return whether an object is one input with one label, rather than the samples of a client."""
    return isinstance(thing, tuple | list) and len(thing) == 2 and not _has_length(thing[1]) and _has_length(thing[0])


def _has_length(thing: Any) -> bool:
    return not isinstance(thing, str | bytes) and hasattr(thing, "__len__") and getattr(thing, "ndim", 1) > 0


def _is_source(thing: Any) -> bool:
    """Return whether an object can be the samples of a client, rather than the value of a recipe field."""
    if isinstance(thing, tuple | list):
        return any(hasattr(value, "__len__") and not isinstance(value, str) for value in thing)
    return is_data(thing) if isinstance(thing, Mapping) else has_items(thing) or as_pandas(thing) is not None
