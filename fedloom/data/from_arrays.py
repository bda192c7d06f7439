"""Datasets from arrays, tensors and frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data.coding import coded, plain_array
from fedloom.data.frames import as_pandas, inputs_of

FEW = 20
"""Datasets with fewer samples may have nearly as many classes."""


def from_arrays(
    x: Any, y: Any, *, name: str = "arrays", test: Any = None, groups: Any = None, classes: Sequence[str] | None = None
) -> Dataset:
    """Make a dataset of inputs and labels.

    Args:
        x: Inputs [N, …]: an array, a tensor, a frame, or nested lists. uint8 and uint16 inputs with three or four
            dimensions are images: [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3. Everything else keeps its
            shape. uint8 images stay bytes; all others become float32. Columns of texts and categories in a frame become
            one input of 0 or 1 per distinct value.
        y: Labels [N], numbers or texts. The distinct values, sorted, are the classes. Or 0 and 1 [N, L], if a sample
            can have several of L labels (`objective="multilabel"`); the columns of a frame give their names.
        name: Name of the dataset, for reports and messages.
        test: Mask [N] of the official test set; default: there is none.
        groups: Natural client, domain or style of each sample, numbers or texts (`partition="natural"`).
        classes: All classes in order, if they should not be taken from `y`; or the names of the L labels.

    Returns:
        The dataset.

    Raises:
        UserError: Lengths differ, values are missing or are no numbers, or there is only one class.

    Example:
        >>> import numpy as np
        >>> dataset = from_arrays(np.random.rand(6, 3), ["a", "b", "a", "b", "a", "b"])
        >>> dataset.classes, tuple(dataset.inputs.shape)
        (('a', 'b'), (6, 3))
    """
    inputs, notes = _inputs(name, x)
    several = _multilabel(name, y, len(inputs), classes)
    labels, found = coded(name, "labels", y, len(inputs), classes) if several is None else several
    if len(found) < 2:
        raise UserError(f"dataset '{name}': all labels are {found[0]!r}; at least two classes are needed")
    if several is None and len(inputs) >= FEW and len(found) > len(inputs) / 2:
        notes += (f"{len(found)} classes for {len(inputs)} samples: check that the labels are classes",)
    owners, group_names = (None, ()) if groups is None else coded(name, "groups", groups, len(inputs))
    mask = torch.zeros(len(inputs), dtype=torch.bool) if test is None else _mask(name, test, len(inputs))
    return Dataset(
        name=name, inputs=inputs, labels=labels, test=mask, classes=found, groups=owners, group_names=group_names,
        notes=notes,
    )  # fmt: skip


def _inputs(name: str, x: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return inputs as a tensor of bytes or float32, and notes about columns of texts."""
    if (frame := as_pandas(x)) is not None:
        array, notes = inputs_of(frame, name)
        return torch.from_numpy(array), notes
    array = plain_array(name, "x", x)
    if array.dtype.kind == "c":
        raise UserError(f"dataset '{name}': x is complex; give real and imaginary part as two channels")
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"dataset '{name}': x has the type {array.dtype}; expected numbers (x.astype('float32')), "
            "or a pandas frame if columns have texts"
        )
    if array.ndim < 2 or array.size == 0:
        remedy = "; give one value per sample as x.reshape(-1, 1)" if array.ndim == 1 and len(array) else ""
        raise UserError(f"dataset '{name}': x has the shape {array.shape}; expected inputs [N, …]{remedy}")
    if array.dtype in (np.uint8, np.uint16) and array.ndim in (3, 4):
        images = _images(torch.from_numpy(np.ascontiguousarray(array)))
        return (images if images.dtype == torch.uint8 else images.float()), ()
    with np.errstate(over="ignore"):
        values = np.array(array, np.float32, order="C")
    if array.dtype.itemsize > 4 and np.isinf(values).any() and not np.isinf(array).any():
        raise UserError(f"dataset '{name}': x has values above {np.finfo(np.float32).max:.1e}; scale them")
    return torch.from_numpy(values), ()


def _mask(name: str, test: Any, count: int) -> Tensor:
    """Return the mask of the official test set as bool [N]."""
    array = plain_array(name, "test", test)
    if array.shape != (count,) or array.dtype.kind not in "biu" or (array > 1).any() or (array < 0).any():
        raise UserError(
            f"dataset '{name}': test is {array.dtype} {list(array.shape)}; it must be a mask with one bool for each of "
            f"{count} samples"
        )
    return torch.from_numpy(array.astype(bool))


def _images(values: Tensor) -> Tensor:
    """Bring images of integers to [N, C, H, W]."""
    if values.dim() == 3:
        return values[:, None].contiguous()
    last = values.shape[1] not in (1, 3) and values.shape[3] in (1, 3)
    return (values.permute(0, 3, 1, 2) if last else values).contiguous()


def _multilabel(name: str, y: Any, count: int, known: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return labels [N, L] of 0 and 1 as uint8, and the names of the labels; None for one class per sample."""
    array = plain_array(name, "y", y)
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
