"""Datasets from map-style PyTorch datasets and Hugging Face datasets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError, brief, shown
from fedloom.data.coding import plain_array
from fedloom.data.frames import LABELS
from fedloom.data.from_arrays import from_arrays

INPUTS = ("image", "img", "x", "input", "inputs", "features", "pixel_values")
"""Names of columns that are read as inputs, in order of preference."""


class Samples(NamedTuple):
    """Inputs and labels of one source of samples."""

    x: Any
    y: Any
    classes: tuple[str, ...] | None = None
    """All classes in order, if the source names them."""


def from_torch(dataset: Any, *, name: str | None = None, columns: tuple[str, str] | None = None) -> Dataset:
    """Make a dataset of a map-style PyTorch dataset or a Hugging Face dataset, by reading all its samples.

    Args:
        dataset: Something with a length and items: (input, label) pairs, or mappings with named columns. The class
            names of a Hugging Face dataset are kept.
        name: Name of the dataset; default: the name of its class.
        columns: Columns of the input and the label, for items that are mappings. Default: the first column called
            image, img, x, input, inputs, features or pixel_values, and the first called label, labels, target, class
            or y.

    Returns:
        The dataset.

    Raises:
        UserError: Items are of another form, differ in shape, or cannot be read.

    Example:
        >>> pairs = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> from_torch(pairs).name
        'TensorDataset'
    """
    name = name or type(dataset).__name__
    x, y, classes = read_items(dataset, name, columns)
    return from_arrays(x, y, name=name, classes=classes)


def read_items(dataset: Any, name: str, columns: tuple[str, str] | None = None) -> Samples:
    """Read all samples of a map-style dataset; see `from_torch`."""
    items = []
    for i in range(len(dataset)):
        try:
            items.append(dataset[i])
        except Exception as error:
            raise UserError(f"dataset '{name}': sample {i} cannot be read: {brief(error)}") from error
    if not items:
        raise UserError(f"dataset '{name}': it has no samples")
    names = None
    if isinstance(items[0], Mapping):
        columns = columns or _columns(name, items[0])
        names = _class_names(dataset, columns[1])
    else:
        columns = None
    items = [_pair(name, i, item, columns) for i, item in enumerate(items)]
    inputs = [plain_array(name, "an input", x) for x, _ in items]
    if other := next((i for i, x in enumerate(inputs) if x.shape != inputs[0].shape), None):
        raise UserError(
            f"dataset '{name}': samples differ in shape: {inputs[0].shape} of sample 0 and {inputs[other].shape} of "
            f"sample {other}; resize or pad them"
        )
    shapes = [_label_shape(name, i, y) for i, (_, y) in enumerate(items)]
    if (other := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)) is not None:
        raise UserError(
            f"dataset '{name}': labels differ in shape: {shapes[0]} of sample 0 and {shapes[other]} of sample {other}; "
            "give every sample one class, or a 0 or 1 for every label"
        )
    if shapes[0]:  # several labels per sample
        return Samples(np.stack(inputs), np.stack([np.asarray(y) for _, y in items]))
    labels = [np.asarray(y).item() if isinstance(y, Tensor | np.ndarray | np.generic | list) else y for _, y in items]
    if names is not None:
        if missing := [i for i, y in enumerate(labels) if not _is_class(y, len(names))]:
            raise UserError(
                f"dataset '{name}': {len(missing)} of {len(labels)} samples have no label (sample {missing[0]}: "
                f"{shown(labels[missing[0]])}); leave them out"
            )
        labels = [names[int(y)] for y in labels]
    return Samples(np.stack(inputs), labels, names)


def _pair(name: str, i: int, item: Any, columns: tuple[str, str] | None) -> tuple[Any, Any]:
    """Return input and label of an item; mappings have them in the given columns."""
    where = f"dataset '{name}': sample {i}"
    if columns is not None and isinstance(item, Mapping):
        if absent := [column for column in columns if column not in item]:
            raise UserError(
                f"{where} has no column '{absent[0]}', only {', '.join(map(str, item))}; add it, leave the sample out, "
                "or use fedloom.data.from_torch(dataset, columns=(INPUT, LABEL))"
            )
        return item[columns[0]], item[columns[1]]
    if columns is not None or not isinstance(item, tuple | list) or len(item) != 2:
        got = f"has {len(item)} values" if isinstance(item, tuple | list) else f"is a {type(item).__name__}"
        raise UserError(f"{where} {got}; items must be (input, label) pairs or mappings with two known columns")
    return item[0], item[1]


def _label_shape(name: str, i: int, label: Any) -> tuple[int, ...]:
    """Return the shape of a sample's label; () for one class."""
    try:
        array = np.asarray(label)
    except ValueError as error:
        raise UserError(f"dataset '{name}': the label of sample {i} cannot be read: {brief(error)}") from error
    if not array.size:
        raise UserError(f"dataset '{name}': sample {i} has an empty label; leave it out")
    return () if array.size == 1 else array.shape


def _is_class(label: Any, classes: int) -> bool:
    return isinstance(label, int | float) and 0 <= label < classes and label == int(label)


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
