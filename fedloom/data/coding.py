"""Labels and names as positions among their distinct values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError, brief, shown


def coded(
    name: str, field: str, values: Any, count: int, known: Sequence[str] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Replace values by their positions among the distinct ones.

    Args:
        name: Name of the dataset, for errors.
        field: What the values are, for errors: `labels`, `groups`.
        values: Numbers or texts [N]; whole numbers may be floats.
        count: Number of samples.
        known: All values in order, as texts, if they should not be taken from `values`.

    Returns:
        The positions, int64 [N], and the distinct values, sorted, as texts.

    Raises:
        UserError: Values are missing, are neither whole numbers nor texts, are not in `known`, or there are more or
            fewer than samples.
    """
    if values is None:
        raise UserError(f"dataset '{name}': {field} are None; give one for each of {count} samples")
    array = plain_array(name, field, values).reshape(-1)
    if missing := int(missing_values(array).sum()):
        raise UserError(f"dataset '{name}': {missing} of {len(array)} {field} are missing; drop these samples")
    if len(array) != count:
        raise UserError(f"dataset '{name}': {len(array)} {field} for {count} samples")
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
        broken = ~((np.abs(array) < 2**53) & (array == np.rint(array)))
        if broken.any():
            raise UserError(
                f"dataset '{name}': {field} must be whole numbers or texts, but {int(broken.sum())} of {count} are "
                f"not, for example {float(array[broken][0]):g}; give classes, such as (values > 0).astype(int)"
            )
        array = array.astype(np.int64)
    try:
        found, codes = np.unique(array, return_inverse=True)
    except TypeError as error:
        raise UserError(f"dataset '{name}': {field} must be numbers or texts, not both ({error})") from None
    names = tuple(text(value) for value in found)
    if known is None:
        return torch.from_numpy(codes.astype(np.int64)), names
    known = tuple(map(text, known))
    if len(set(known)) < len(known):
        raise UserError(f"dataset '{name}': classes = {shown(known)}: a name is there twice; remove one")
    if unknown := [value for value in names if value not in known]:
        raise UserError(f"dataset '{name}': {field} contain {unknown[0]!r}, which is not in classes")
    order = np.array([known.index(value) for value in names], np.int64)
    return torch.from_numpy(order[codes]), known


def plain_array(name: str, field: str, values: Any) -> np.ndarray:
    """Return values as a NumPy array in this machine's byte order.

    Raises:
        UserError: Lengths differ within the values, values are masked, or a matrix or tensor is sparse.
    """
    if isinstance(values, Tensor):
        if values.layout != torch.strided:
            raise UserError(f"dataset '{name}': {field} is a sparse tensor; give {field}.to_dense()")
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if hasattr(values, "toarray"):  # scipy.sparse
        raise UserError(f"dataset '{name}': {field} is a sparse matrix; give {field}.toarray()")
    if isinstance(values, np.ma.MaskedArray) and (masked := int(np.ma.count_masked(values))):
        raise UserError(f"dataset '{name}': {masked} values of {field} are masked; fill them, or drop the samples")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(
            f"dataset '{name}': {field} cannot be read as an array: {brief(error)}; give all entries the same shape"
        ) from None
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def missing_values(array: np.ndarray) -> np.ndarray:
    """Return a mask of the values that are None, NaN, NaT or pandas.NA."""
    if array.dtype.kind in "fmM":
        return array != array
    if array.dtype.kind != "O":
        return np.zeros(len(array), bool)
    # NaN and NaT differ from themselves; the result for pandas.NA is pandas.NA.
    return np.array([value is None or not _is_false(value != value) for value in array], bool)


def _is_false(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) and not value


def text(value: Any) -> str:
    """Return a label as text; bytes are decoded."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
