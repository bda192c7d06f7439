"""Datasets from samples that are divided already: among clients, or into training and test samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data.coding import missing_values, plain_array
from fedloom.data.frames import as_pandas, label_column, refuse_repeated
from fedloom.data.from_arrays import from_arrays
from fedloom.data.from_torch import Samples, read_items

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
"""Usual names of splits. A mapping that has `train` and only such names holds splits, not clients."""


def from_clients(
    clients: Mapping[str, Any] | Sequence[Any], *, name: str = "clients", classes: Sequence[str] | None = None
) -> Dataset:
    """Make a dataset of samples that are already divided among clients.

    Args:
        clients: The samples of each client, by its name or in order: a pair (x, y), a PyTorch or Hugging Face dataset,
            a frame with a column of labels, or `{"train": …, "test": …}` of these.
        name: Name of the dataset, for reports and messages.
        classes: All classes in order, if they should not be taken from the labels.

    Returns:
        The dataset, whose groups are the clients; run it with `partition="natural"`. With `data.split: common` each
        client is tested on its own samples of `test`.

    Raises:
        UserError: There are no clients, or their samples do not fit together.

    Example:
        >>> import numpy as np
        >>> x, y = np.random.rand(4, 3), [0, 1, 0, 1]
        >>> from_clients({"north": (x, y), "south": (x, y)}).group_names
        ('north', 'south')
    """
    pairs = list(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
    each = {str(client): thing for client, thing in pairs}
    if not each:
        raise UserError(f"dataset '{name}': no clients were given")
    if len(each) < len(pairs):
        raise UserError(f"dataset '{name}': two clients have the same name as texts; rename one")
    parts = [
        _part(name, f"client '{client}'", samples, test=split == "test", client=client)
        for client, thing in each.items()
        for split, samples in _checked(name, thing if is_split(thing) else {"train": thing}).items()
    ]
    return _joined(parts, name, classes)


def from_splits(splits: Mapping[str, Any], *, name: str | None = None) -> Dataset:
    """Make a dataset of the splits `train` and `test`, such as a Hugging Face `DatasetDict`.

    Args:
        splits: The splits, each a pair (x, y), a PyTorch or Hugging Face dataset, or a frame with a column of labels.
            Samples of `test` are the official test set (`data.split: official`).
        name: Name of the dataset; default: the name of the splits' class.

    Raises:
        UserError: There are other splits, or the splits do not fit together.
    """
    kind = type(splits.get("train"))
    name = name or ("arrays" if kind in (tuple, list) else kind.__name__)
    parts = [
        _part(name, f"the split '{split}'", samples, test=split == "test")
        for split, samples in _checked(name, splits).items()
    ]
    return _joined(parts, name, None)


def is_split(thing: Any) -> bool:
    """Return whether an object is a mapping of splits, rather than of clients."""
    return isinstance(thing, Mapping) and "train" in thing and set(thing) <= set(SPLITS)


def has_items(thing: Any) -> bool:
    """Return whether an object is a map-style dataset."""
    plain = isinstance(thing, str | bytes | list | tuple | Mapping | type) or hasattr(thing, "__array__")
    return hasattr(thing, "__len__") and hasattr(thing, "__getitem__") and not plain


class _Part(NamedTuple):
    """Samples of one client or split."""

    owner: str
    """Where they come from, for errors."""
    samples: Samples
    test: bool
    client: str | None


def _checked(name: str, splits: Mapping[str, Any]) -> Mapping[str, Any]:
    if "train" not in splits or set(splits) - {"train", "test"}:
        raise UserError(
            f"dataset '{name}': the splits {', '.join(map(str, splits))} cannot be used together; give one of them, or "
            '{"train": …, "test": …}; data.split sets validation samples aside'
        )
    return splits


def _part(name: str, owner: str, thing: Any, *, test: bool, client: str | None = None) -> _Part:
    if isinstance(thing, tuple | list) and len(thing) == 2:
        samples = Samples(*thing)
    elif (frame := as_pandas(thing)) is not None:
        label = label_column(list(frame.columns), None, f"dataset '{name}': {owner}", "as a pair (x, y)")
        samples = Samples(frame.drop(columns=label), frame[label])
    elif has_items(thing):
        samples = read_items(thing, f"{name}, {owner}")
    else:
        raise UserError(
            f"dataset '{name}': {owner} must have a pair (x, y) of inputs and labels, a frame or a PyTorch dataset, "
            f"not {'a tuple of ' + str(len(thing)) if isinstance(thing, tuple) else 'a ' + type(thing).__name__}"
        )
    return _Part(owner, samples, test, client)


def _joined(parts: list[_Part], name: str, classes: Sequence[str] | None) -> Dataset:
    """Make one dataset of several parts, and refuse parts that do not fit together."""
    frames = [as_pandas(part.samples.x) for part in parts]
    tables = [frame for frame in frames if frame is not None]
    if len(tables) < len(parts):
        arrays = [plain_array(name, f"x of {part.owner}", part.samples.x) for part in parts]
        _refuse_empty(name, parts, arrays)
        _refuse_not_finite(name, parts, arrays)
        _same(name, "samples differ in shape", parts, [array.shape[1:] for array in arrays])
        # Bytes have another scale than numbers from 0 to 1, and images another order of axes than other inputs.
        kinds = [str(array.dtype) if array.dtype in (np.uint8, np.uint16) else "numbers" for array in arrays]
        _same(name, "inputs differ in type", parts, kinds)
        x, sizes = np.concatenate(arrays), list(map(len, arrays))
    else:
        _refuse_empty(name, parts, tables)
        x, sizes = _one_frame(name, parts, tables), list(map(len, tables))
    labels = [_labels(name, part, size) for part, size in zip(parts, sizes, strict=True)]
    _same(name, "labels differ in shape", parts, [y.shape[1:] for y in labels])
    texts = [y.dtype.kind in "SU" or (y.dtype.kind == "O" and isinstance(y.flat[0], str)) for y in labels]
    _same(name, "labels differ in type", parts, ["texts" if is_text else "numbers" for is_text in texts])
    _same(name, "classes differ", parts, [part.samples.classes for part in parts])
    test = np.repeat([part.test for part in parts], sizes)
    dataset = from_arrays(x, np.concatenate(labels), name=name, test=test, classes=classes or parts[0].samples.classes)
    names = list(dict.fromkeys(part.client for part in parts))
    if names == [None]:
        return replace(dataset, split="official") if test.any() else dataset
    owners = np.repeat([names.index(part.client) for part in parts], sizes)
    split = "common" if test.any() else None  # each client is tested on its own test samples
    return replace(dataset, groups=torch.from_numpy(owners), group_names=tuple(map(str, names)), split=split)


def _refuse_empty(name: str, parts: list[_Part], inputs: Sequence[Any]) -> None:
    for part, x in zip(parts, inputs, strict=True):
        if x.ndim == 0 or not len(x):
            raise UserError(f"dataset '{name}': {part.owner} has no samples; leave it out")


def _refuse_not_finite(name: str, parts: list[_Part], inputs: Sequence[np.ndarray]) -> None:
    for part, x in zip(parts, inputs, strict=True):
        if x.dtype.kind == "f" and (bad := np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))).size:
            raise UserError(
                f"dataset '{name}': {bad.size} of {len(x)} samples of {part.owner} contain NaN or infinity, first "
                f"sample {bad[0]}; remove them or fill the missing values"
            )


def _one_frame(name: str, parts: list[_Part], frames: list[Any]) -> Any:
    import pandas

    for part, frame in zip(parts, frames, strict=True):
        refuse_repeated(list(frame.columns), f"dataset '{name}': {part.owner}")
    _same(name, "columns differ", parts, [tuple(sorted(frame.columns)) for frame in frames])
    return pandas.concat([frame[list(frames[0].columns)] for frame in frames], ignore_index=True)


def _labels(name: str, part: _Part, size: int) -> np.ndarray:
    array = plain_array(name, f"labels of {part.owner}", part.samples.y)
    array = array if array.ndim == 2 and array.shape[1] > 1 else array.reshape(-1)
    if len(array) != size:
        raise UserError(f"dataset '{name}': {part.owner} has {len(array)} labels for {size} samples")
    if missing := int(missing_values(array).sum()):
        raise UserError(f"dataset '{name}': {missing} of {size} labels of {part.owner} are missing; drop these samples")
    return array


def _same(name: str, problem: str, parts: list[_Part], values: list[Any]) -> None:
    """Raise a UserError unless a property of all parts is the same."""
    for part, value in zip(parts, values, strict=True):
        if value != values[0]:
            raise UserError(f"dataset '{name}': {problem}: {values[0]} of {parts[0].owner} and {value} of {part.owner}")
