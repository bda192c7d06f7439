"""Datasets from objects of other libraries: pandas frames, PyTorch datasets, Hugging Face datasets."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data.from_arrays import from_arrays, from_clients

INPUTS = ("image", "img", "x", "input", "inputs", "features", "pixel_values")
"""Names of columns that are read as inputs, in order of preference."""
LABELS = ("label", "labels", "y", "target", "class")
"""Names of columns that are read as labels."""


def from_torch(dataset: Any, *, name: str | None = None, columns: tuple[str, str] | None = None) -> Dataset:
    """Make a dataset of a map-style PyTorch dataset or a Hugging Face dataset, by reading all its samples.

    Args:
        dataset: Something with a length and items: (input, label) pairs, or mappings with named columns. The class
            names of a Hugging Face dataset are kept.
        name: Name of the dataset; default: the name of its class.
        columns: Columns of the input and the label, for items that are mappings. Default: the first column called
            image, img, x, input, inputs, features or pixel_values, and the first called label, labels, y, target or
            class.

    Returns:
        The dataset.

    Raises:
        UserError: Items are of another form, or differ in shape.

    Example:
        >>> pairs = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> from_torch(pairs).name
        'TensorDataset'
    """
    name = name or type(dataset).__name__
    items = [dataset[i] for i in range(len(dataset))]
    names = None
    if items and isinstance(items[0], Mapping):
        columns = columns or _columns(name, items[0])
        names = _class_names(dataset, columns[1])
        items = [(item[columns[0]], item[columns[1]]) for item in items]
    if not items or not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        raise UserError(f"dataset '{name}': items must be (input, label) pairs or mappings with two known columns")
    inputs = [np.asarray(x) for x, _ in items]
    if other := next((i for i, x in enumerate(inputs) if x.shape != inputs[0].shape), None):
        raise UserError(
            f"dataset '{name}': samples differ in shape: {inputs[0].shape} of sample 0 and {inputs[other].shape} of "
            f"sample {other}; resize or pad them"
        )
    if np.asarray(items[0][1]).size > 1:  # several labels per sample
        return from_arrays(np.stack(inputs), np.stack([np.asarray(y) for _, y in items]), name=name)
    labels = [y.item() if isinstance(y, Tensor | np.ndarray | np.generic) else y for _, y in items]
    if names is not None:
        if (missing := sum(not 0 <= int(y) < len(names) for y in labels)) > 0:
            raise UserError(f"dataset '{name}': {missing} of {len(labels)} samples have no label; leave them out")
        return from_arrays(np.stack(inputs), [names[int(y)] for y in labels], name=name, classes=names)
    return from_arrays(np.stack(inputs), labels, name=name)


def from_frame(frame: Any, *, label: str | None = None, name: str = "frame") -> Dataset:
    """Make a dataset of a pandas frame with numeric columns and a column of labels.

    Args:
        frame: The frame.
        label: The column of labels. Default: the one called label, labels, y, target or class.
        name: Name of the dataset, for reports and messages.

    Returns:
        The dataset; its inputs are all other columns, in order.

    Raises:
        UserError: The column of labels is not clear, columns are not numeric, or values are missing.

    Example:
        >>> from_frame(frame, label="diagnosis")   # doctest: +SKIP
    """
    columns = [str(column) for column in frame.columns]
    found = [column for column in columns if column.lower() in LABELS] if label is None else [label]
    if len(found) != 1 or found[0] not in columns:
        raise UserError(
            f"dataset '{name}': the column of labels is not clear among {', '.join(columns[:10])}; use "
            "fedloom.data.from_frame(frame, label=NAME), or a pair (x, y)"
        )
    return from_arrays(frame.drop(columns=found[0]), frame[found[0]], name=name)


def from_splits(splits: Mapping[str, Any], *, name: str | None = None) -> Dataset:
    """Make a dataset of the splits `train` and `test`, such as a Hugging Face `DatasetDict`.

    Args:
        splits: The splits, each as `from_torch` takes it. Samples of `test` are the official test set
            (`data.split: official`).
        name: Name of the dataset; default: the name of the splits' class.

    Raises:
        UserError: There are other splits, or the splits do not fit together.
    """
    if set(splits) != {"train", "test"}:
        raise UserError(
            f"data: the splits {', '.join(map(str, splits))} cannot be used together; give one of them, or "
            '{"train": …, "test": …}'
        )
    parts = [from_torch(splits[split], name=name or type(splits[split]).__name__) for split in ("train", "test")]
    train, test = parts
    if train.inputs.shape[1:] != test.inputs.shape[1:] or not {*test.classes} <= {*train.classes}:
        raise UserError(f"data: the splits of '{train.name}' differ in the shape of samples or in their classes")
    place = torch.tensor([train.classes.index(value) for value in test.classes])
    return replace(
        train,
        inputs=torch.cat([train.inputs, test.inputs]),
        labels=torch.cat([train.labels, place[test.labels]]),
        test=torch.cat([torch.zeros(len(train), dtype=torch.bool), torch.ones(len(test), dtype=torch.bool)]),
    )


def as_dataset(thing: Any) -> Dataset:
    """Make a dataset of any of the objects that `fedloom.run(data=…)` takes.

    Args:
        thing: A `Dataset`, a pair (x, y), a mapping of client names to pairs, a list of pairs, a pandas frame with a
            column of labels, a PyTorch dataset, a Hugging Face dataset, or its splits.

    Raises:
        UserError: The object is none of these.
    """
    if isinstance(thing, Dataset):
        return thing
    if isinstance(thing, Mapping):
        return from_splits(thing) if thing and all(map(_has_items, thing.values())) else from_clients(thing)
    if isinstance(thing, tuple) and len(thing) == 2:
        return from_arrays(*thing)
    if isinstance(thing, list) and thing and all(isinstance(pair, tuple) and len(pair) == 2 for pair in thing):
        return from_clients(thing)
    if hasattr(thing, "columns") and hasattr(thing, "to_numpy"):
        return from_frame(thing)
    if _has_items(thing):
        return from_torch(thing)
    raise UserError(
        f"data: a {type(thing).__name__} cannot be used; give a name, a pair (x, y), a dict of pairs per client, a "
        "fedloom.data.Dataset, a pandas frame or a PyTorch dataset"
    )


def is_data(thing: Any) -> bool:
    """Return whether a value is an object with data, rather than a name or a recipe section."""
    if isinstance(thing, Mapping):
        return bool(thing) and all(isinstance(value, tuple) or _has_items(value) for value in thing.values())
    return not isinstance(thing, str)


def _has_items(thing: Any) -> bool:
    """Return whether an object is a map-style dataset."""
    plain = isinstance(thing, str | bytes | list | tuple | Mapping | np.ndarray | Tensor)
    return hasattr(thing, "__len__") and hasattr(thing, "__getitem__") and not plain


def _columns(name: str, item: Mapping[str, Any]) -> tuple[str, str]:
    inputs = next((c for c in INPUTS if c in item), None)
    labels = next((c for c in LABELS if c in item), None)
    if inputs is None or labels is None:
        raise UserError(
            f"dataset '{name}': input and label are not clear among the columns {', '.join(map(str, item))}; use "
            "fedloom.data.from_torch(dataset, columns=(INPUT, LABEL))"
        )
    return inputs, labels


def _class_names(dataset: Any, column: str) -> tuple[str, ...] | None:
    """Return the class names that a Hugging Face dataset has for a column of labels."""
    features = getattr(dataset, "features", None)
    feature = features.get(column) if isinstance(features, Mapping) else None
    names = getattr(feature, "names", None)
    return tuple(map(str, names)) if names else None
