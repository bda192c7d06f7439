"""Datasets from map-style PyTorch datasets and Hugging Face datasets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError, brief
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
        items = [(item[columns[0]], item[columns[1]]) for item in items]
    if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        got = f"{len(items[0])} values" if isinstance(items[0], tuple | list) else f"a {type(items[0]).__name__}"
        raise UserError(
            f"dataset '{name}': an item is {got}; items must be (input, label) pairs or mappings with two known columns"
        )
    inputs = [plain_array(name, "an input", x) for x, _ in items]
    if other := next((i for i, x in enumerate(inputs) if x.shape != inputs[0].shape), None):
        raise UserError(
            f"dataset '{name}': samples differ in shape: {inputs[0].shape} of sample 0 and {inputs[other].shape} of "
            f"sample {other}; resize or pad them"
        )
    if np.asarray(items[0][1]).size > 1:  # several labels per sample
        return Samples(np.stack(inputs), np.stack([np.asarray(y) for _, y in items]))
    labels = [y.item() if isinstance(y, Tensor | np.ndarray | np.generic) else y for _, y in items]
    if names is not None:
        if (missing := sum(not 0 <= int(y) < len(names) for y in labels)) > 0:
            raise UserError(f"dataset '{name}': {missing} of {len(labels)} samples have no label; leave them out")
        labels = [names[int(y)] for y in labels]
    return Samples(np.stack(inputs), labels, names)


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
