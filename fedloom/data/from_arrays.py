"""Datasets from Python objects: arrays, tensors, frames, PyTorch datasets, and arrays per client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset

Pair = tuple[Any, Any]
"""Inputs and labels."""


def from_arrays(
    x: Any, y: Any, *, name: str = "arrays", test: Any = None, groups: Any = None, classes: Sequence[str] | None = None
) -> Dataset:
    """Make a dataset of inputs and labels.

    Args:
        x: Inputs [N, …]: an array, a tensor, a pandas frame with numeric columns, or nested lists. uint8 inputs with
            three or four dimensions are images: [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3. Everything
            else becomes float32 and keeps its shape.
        y: Labels [N], numbers or texts. The distinct values, sorted, are the classes.
        name: Name of the dataset, for reports and messages.
        test: Mask [N] of the official test set; default: there is none.
        groups: Natural client, domain or style of each sample, numbers or texts (`partition="natural"`).
        classes: All classes in order, if they should not be taken from `y`.

    Returns:
        The dataset.

    Raises:
        UserError: Lengths differ, values are missing or not numeric, or there is only one class.

    Example:
        >>> import numpy as np
        >>> dataset = from_arrays(np.random.rand(6, 3), ["a", "b", "a", "b", "a", "b"])
        >>> dataset.classes, tuple(dataset.images.shape)
        (('a', 'b'), (6, 3))
    """
    inputs = _inputs(name, x)
    labels, found = _coded(name, "labels", y, len(inputs), classes)
    if len(found) < 2:
        raise UserError(f"dataset '{name}': all labels are {found[0]!r}; at least two classes are needed")
    coded, group_names = (None, ()) if groups is None else _coded(name, "groups", groups, len(inputs))
    mask = torch.zeros(len(inputs), dtype=torch.bool) if test is None else torch.as_tensor(np.asarray(test)).bool()
    return Dataset(
        name=name, images=inputs, labels=labels, test=mask, classes=found, groups=coded, group_names=group_names
    )


def from_clients(
    clients: Mapping[str, Pair] | Sequence[Pair], *, name: str = "clients", classes: Sequence[str] | None = None
) -> Dataset:
    """Make a dataset of inputs and labels that are already divided among clients.

    Args:
        clients: Inputs and labels of each client, by its name or in order.
        name: Name of the dataset, for reports and messages.
        classes: All classes in order, if they should not be taken from the labels.

    Returns:
        The dataset, whose groups are the clients; run it with `partition="natural"`.

    Raises:
        UserError: There are no clients, or the arrays do not fit together.

    Example:
        >>> import numpy as np
        >>> x, y = np.random.rand(4, 3), [0, 1, 0, 1]
        >>> from_clients({"north": (x, y), "south": (x, y)}).group_names
        ('north', 'south')
    """
    pairs = dict(clients) if isinstance(clients, Mapping) else {str(i): pair for i, pair in enumerate(clients)}
    if not pairs:
        raise UserError(f"dataset '{name}': no clients were given")
    inputs = [_inputs(f"{name}: {client}", x) for client, (x, _) in pairs.items()]
    shapes = {tuple(part.shape[1:]): client for client, part in zip(pairs, inputs, strict=True)}
    if len(shapes) > 1:
        said = " and ".join(f"{shape} of client '{client}'" for shape, client in list(shapes.items())[:2])
        raise UserError(f"dataset '{name}': samples differ in shape: {said}")
    labels = np.concatenate([np.asarray(y).reshape(-1) for _, y in pairs.values()])
    owners = np.repeat(np.arange(len(pairs)), [len(part) for part in inputs])
    dataset = from_arrays(torch.cat(inputs), labels, name=name, classes=classes)
    return Dataset(
        name=name, images=dataset.images, labels=dataset.labels, test=dataset.test, classes=dataset.classes,
        groups=torch.from_numpy(owners), group_names=tuple(pairs),
    )  # fmt: skip


def from_torch(dataset: Any, *, name: str | None = None, columns: tuple[str, str] | None = None) -> Dataset:
    """Make a dataset of a map-style PyTorch dataset or a Hugging Face dataset, by reading all its samples.

    Args:
        dataset: Something with a length and items: (input, label) pairs, or mappings with named columns.
        name: Name of the dataset; default: the name of its class.
        columns: Columns of the input and the label, for items that are mappings. Default: the first column called
            image, img, x or input, and the first called label, labels, y or target.

    Returns:
        The dataset.

    Raises:
        UserError: Items are of another form.

    Example:
        >>> pairs = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> from_torch(pairs).name
        'TensorDataset'
    """
    name = name or type(dataset).__name__
    items = [dataset[i] for i in range(len(dataset))]
    if items and isinstance(items[0], Mapping):
        columns = columns or _columns(name, items[0])
        items = [(item[columns[0]], item[columns[1]]) for item in items]
    if not items or not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        raise UserError(f"dataset '{name}': items must be (input, label) pairs or mappings with two known columns")
    return from_arrays(np.stack([np.asarray(x) for x, _ in items]), [np.asarray(y).item() for _, y in items], name=name)


def as_dataset(thing: Any) -> Dataset:
    """Make a dataset of any of the objects that `fedloom.run(data=…)` takes.

    Args:
        thing: A `Dataset`, a pair (x, y), a mapping of client names to pairs, a list of pairs, a PyTorch dataset or a
            Hugging Face dataset.

    Raises:
        UserError: The object is none of these.
    """
    if isinstance(thing, Dataset):
        return thing
    if isinstance(thing, Mapping):
        return from_clients(thing)
    if isinstance(thing, tuple) and len(thing) == 2:
        return from_arrays(*thing)
    if isinstance(thing, list) and thing and all(isinstance(pair, tuple) and len(pair) == 2 for pair in thing):
        return from_clients(thing)
    if hasattr(thing, "__len__") and hasattr(thing, "__getitem__") and not isinstance(thing, str | np.ndarray | Tensor):
        return from_torch(thing)
    raise UserError(
        f"data: a {type(thing).__name__} cannot be used; give a name, a pair (x, y), a dict of pairs per client, a "
        "fedloom.data.Dataset or a PyTorch dataset"
    )


def _inputs(name: str, x: Any) -> Tensor:
    if hasattr(x, "to_numpy"):
        x = _numeric_frame(name, x)
    values = x.detach().cpu() if isinstance(x, Tensor) else _tensor(name, x)
    if values.dim() == 0 or len(values) == 0:
        raise UserError(f"dataset '{name}': x has shape {tuple(values.shape)}; expected inputs [N, …]")
    if values.dtype == torch.uint8 and values.dim() in (3, 4):
        return _images(values)
    return values.float().contiguous()


def _tensor(name: str, x: Any) -> Tensor:
    try:
        array = np.asarray(x)
        if array.dtype == np.uint16:
            array = array.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        raise UserError(f"dataset '{name}': x cannot be read as an array of numbers: {error}") from None


def _images(values: Tensor) -> Tensor:
    """Bring uint8 images to [N, C, H, W]."""
    if values.dim() == 3:
        return values[:, None].contiguous()
    last = values.shape[1] not in (1, 3) and values.shape[3] in (1, 3)
    return (values.permute(0, 3, 1, 2) if last else values).contiguous()


def _numeric_frame(name: str, frame: Any) -> np.ndarray:
    """Return the values of a pandas frame or series.

    Raises:
        UserError: Columns are not numeric, or values are missing.
    """
    columns = {column: frame[column] for column in frame.columns} if hasattr(frame, "columns") else {frame.name: frame}
    texts = [str(column) for column, values in columns.items() if values.dtype.kind not in "biuf"]
    if texts:
        raise UserError(
            f"dataset '{name}': columns {', '.join(texts[:5])} are not numeric; encode them, for example with "
            "pandas.get_dummies"
        )
    missing = {str(column): int(values.isna().sum()) for column, values in columns.items()}
    if missing := {column: count for column, count in missing.items() if count}:
        said = ", ".join(f"{column} ({count})" for column, count in list(missing.items())[:5])
        raise UserError(f"dataset '{name}': values are missing in {said}; fill them or drop the rows")
    return np.asarray(frame.to_numpy(), dtype=np.float32)


def _coded(
    name: str, field: str, values: Any, count: int, known: Sequence[str] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Replace values by their positions among the distinct ones; return both."""
    array = (values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)).reshape(-1)
    if len(array) != count:
        raise UserError(f"dataset '{name}': {len(array)} {field} for {count} samples")
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.rint(array)).all()):
        raise UserError(f"dataset '{name}': {field} must be whole numbers or texts")
    array = array.astype(np.int64) if array.dtype.kind == "f" else array
    found, codes = np.unique(array, return_inverse=True)
    names = tuple(str(value) for value in found)
    if known is None:
        return torch.from_numpy(codes.astype(np.int64)), names
    if unknown := [value for value in names if value not in known]:
        raise UserError(f"dataset '{name}': {field} contain {unknown[0]!r}, which is not in classes")
    order = np.array([list(known).index(value) for value in names], np.int64)
    return torch.from_numpy(order[codes]), tuple(known)


def _columns(name: str, item: Mapping[str, Any]) -> tuple[str, str]:
    inputs = next((c for c in ("image", "img", "x", "input") if c in item), None)
    labels = next((c for c in ("label", "labels", "y", "target") if c in item), None)
    if inputs is None or labels is None:
        raise UserError(
            f"dataset '{name}': input and label are not clear among the columns {', '.join(map(str, item))}; use "
            "fedloom.data.from_torch(dataset, columns=(INPUT, LABEL))"
        )
    return inputs, labels
