"""Datasets from arrays, tensors and columns of frames: in one place, or per client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError

Pair = tuple[Any, Any]
"""Inputs and labels."""


def from_arrays(
    x: Any, y: Any, *, name: str = "arrays", test: Any = None, groups: Any = None, classes: Sequence[str] | None = None
) -> Dataset:
    """Make a dataset of inputs and labels.

    Args:
        x: Inputs [N, …]: an array, a tensor, a pandas frame with numeric columns, or nested lists. uint8 and uint16
            inputs with three or four dimensions are images: [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3.
            Everything else keeps its shape. uint8 images stay bytes; all others become float32.
        y: Labels [N], numbers or texts. The distinct values, sorted, are the classes. Or 0 and 1 [N, L], if a sample
            can have several of L labels (`objective="multilabel"`); the columns of a frame give their names.
        name: Name of the dataset, for reports and messages.
        test: Mask [N] of the official test set; default: there is none.
        groups: Natural client, domain or style of each sample, numbers or texts (`partition="natural"`).
        classes: All classes in order, if they should not be taken from `y`; or the names of the L labels.

    Returns:
        The dataset.

    Raises:
        UserError: Lengths differ, values are missing or not numeric, or there is only one class.

    Example:
        >>> import numpy as np
        >>> dataset = from_arrays(np.random.rand(6, 3), ["a", "b", "a", "b", "a", "b"])
        >>> dataset.classes, tuple(dataset.inputs.shape)
        (('a', 'b'), (6, 3))
    """
    inputs = _inputs(name, x)
    several = _multilabel(name, y, len(inputs), classes)
    labels, found = coded(name, "labels", y, len(inputs), classes) if several is None else several
    if len(found) < 2:
        raise UserError(f"dataset '{name}': all labels are {found[0]!r}; at least two classes are needed")
    owners, group_names = (None, ()) if groups is None else coded(name, "groups", groups, len(inputs))
    mask = torch.zeros(len(inputs), dtype=torch.bool) if test is None else torch.as_tensor(np.asarray(test)).bool()
    return Dataset(
        name=name, inputs=inputs, labels=labels, test=mask, classes=found, groups=owners, group_names=group_names
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
    for client, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"dataset '{name}': client '{client}' must have a pair (x, y) of inputs and labels")
    inputs = [_inputs(f"{name}: {client}", x) for client, (x, _) in pairs.items()]
    shapes = {tuple(part.shape[1:]): client for client, part in zip(pairs, inputs, strict=True)}
    if len(shapes) > 1:
        said = " and ".join(f"{shape} of client '{client}'" for shape, client in list(shapes.items())[:2])
        raise UserError(f"dataset '{name}': samples differ in shape: {said}")
    rows = [np.asarray(y) for _, y in pairs.values()]
    rows = [part if part.ndim == 2 and part.shape[1] > 1 else part.reshape(-1) for part in rows]
    if len({part.shape[1:] for part in rows}) > 1:
        raise UserError(f"dataset '{name}': labels of clients differ in shape")
    labels = np.concatenate(rows)
    owners = np.repeat(np.arange(len(pairs)), [len(part) for part in inputs])
    dataset = from_arrays(torch.cat(inputs), labels, name=name, classes=classes)
    return Dataset(
        name=name, inputs=dataset.inputs, labels=dataset.labels, test=dataset.test, classes=dataset.classes,
        groups=torch.from_numpy(owners), group_names=tuple(pairs),
    )  # fmt: skip


def _inputs(name: str, x: Any) -> Tensor:
    if hasattr(x, "to_numpy"):
        x = _numeric_frame(name, x)
    values = x.detach().cpu() if isinstance(x, Tensor) else _tensor(name, x)
    if values.dim() == 0 or len(values) == 0:
        raise UserError(f"dataset '{name}': x has shape {tuple(values.shape)}; expected inputs [N, …]")
    if values.is_complex():
        raise UserError(f"dataset '{name}': x is complex; give real and imaginary part as two channels")
    if values.dtype in (torch.uint8, torch.uint16) and values.dim() in (3, 4):
        values = _images(values)
        return values if values.dtype == torch.uint8 else values.float()
    return values.float().contiguous()


def _tensor(name: str, x: Any) -> Tensor:
    try:
        array = np.asarray(x)
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        raise UserError(f"dataset '{name}': x cannot be read as an array of numbers: {error}") from None


def _images(values: Tensor) -> Tensor:
    """Bring images of integers to [N, C, H, W]."""
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


def _multilabel(name: str, y: Any, count: int, known: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return labels [N, L] of 0 and 1 as uint8, and the names of the labels; None for one class per sample."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.ndim != 2 or array.shape[1] < 2:
        return None
    names = known or getattr(y, "columns", None)
    found = tuple(map(str, range(array.shape[1]) if names is None else names))
    if len(array) != count or len(found) != array.shape[1]:
        raise UserError(
            f"dataset '{name}': labels have shape {list(array.shape)}, for {count} samples and {len(found)} names of "
            "labels"
        )
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise UserError(f"dataset '{name}': labels of shape {list(array.shape)} must contain only 0 and 1")
    return torch.from_numpy(array.astype(np.uint8)), found


def coded(
    name: str, field: str, values: Any, count: int, known: Sequence[str] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Replace values by their positions among the distinct ones; return both."""
    array = (values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)).reshape(-1)
    if array.dtype.kind == "O" and any(value is None or value != value for value in array):
        missing = sum(value is None or value != value for value in array)
        raise UserError(f"dataset '{name}': {missing} of {len(array)} {field} are missing; drop these samples")
    if len(array) != count:
        raise UserError(f"dataset '{name}': {len(array)} {field} for {count} samples")
    if array.dtype.kind == "f" and not ((np.abs(array) < 2**53).all() and (array == np.rint(array)).all()):
        raise UserError(f"dataset '{name}': {field} must be whole numbers or texts, without missing values")
    array = array.astype(np.int64) if array.dtype.kind == "f" else array
    try:
        found, codes = np.unique(array, return_inverse=True)
    except TypeError as error:
        raise UserError(f"dataset '{name}': {field} must be numbers or texts, not both ({error})") from None
    names = tuple(str(value) for value in found)
    if known is None:
        return torch.from_numpy(codes.astype(np.int64)), names
    if unknown := [value for value in names if value not in known]:
        raise UserError(f"dataset '{name}': {field} contain {unknown[0]!r}, which is not in classes")
    order = np.array([list(known).index(value) for value in names], np.int64)
    return torch.from_numpy(order[codes]), tuple(known)
