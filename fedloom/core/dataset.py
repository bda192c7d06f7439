"""A dataset: the inputs, labels and groups of all samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs, labels and groups of all samples. Validated on creation; see also `fedloom.data.from_arrays`."""

    name: str
    inputs: Tensor
    """uint8 images [N, C, H, W], or float32 inputs of any shape [N, …] without NaN or infinity"""
    labels: Tensor
    """int64 [N]: the class of each sample; or uint8 [N, L] of 0 and 1 if a sample can have several of L labels"""
    test: Tensor
    """bool [N]: whether a sample belongs to the official test set (all False if there is none)"""
    classes: tuple[str, ...]
    """Names of the classes, or of the L labels"""
    groups: Tensor | None = None
    """int64 [N]: domain or style of a sample, or its natural client"""
    group_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks about the files that are shown to the user, such as pictures that were left out."""
    views: tuple[str, ...] = ()
    """Default of `data.views`, where the default for inputs of this shape does not suit them."""
    split: str | None = None
    """Default of `data.split` for data that were given as training and test samples in Python."""
    styles: bool = False
    """Whether the groups are styles, which are divided among clients, rather than the clients themselves."""

    def __post_init__(self) -> None:
        count = len(self.inputs)
        if count == 0:
            raise UserError(f"dataset '{self.name}': it has no samples")
        _expect_inputs(self.name, self.inputs)
        if self.multilabel:
            _expect_multilabel(self.name, self.labels, count, len(self.classes))
        else:
            _expect(self.name, "labels", self.labels, torch.int64, 1, count)
            _expect_range(self.name, "label", self.labels, len(self.classes), "classes")
        _expect(self.name, "test", self.test, torch.bool, 1, count)
        if self.groups is not None:
            _expect(self.name, "groups", self.groups, torch.int64, 1, count)
            _expect_range(self.name, "group", self.groups, len(self.group_names), "group names")

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.inputs.shape[1:]))
        kind = "labels" if self.multilabel else "classes"
        groups = f", {len(self.group_names)} {'styles' if self.styles else 'clients'}" if self.group_names else ""
        return f"Dataset({self.name!r}, {len(self):,} samples of {shape}, {len(self.classes)} {kind}{groups})"

    @property
    def multilabel(self) -> bool:
        """Whether a sample can have several labels."""
        return self.labels.dim() == 2

    @property
    def bytes(self) -> bool:
        """Whether inputs are images of bytes."""
        return self.inputs.dtype == torch.uint8

    @property
    def area(self) -> int:
        """Number of pixels of an image, or of values of another input."""
        sample = self.inputs[0]
        return sample[0].numel() if sample.dim() == 3 else sample.numel()

    @property
    def scale(self) -> int:
        """Divisor that brings stored values to the range of the network: 255 for bytes, else 1."""
        return 255 if self.bytes else 1


def _expect_inputs(name: str, inputs: Tensor) -> None:
    if inputs.dtype == torch.uint8 and inputs.dim() == 4:
        return
    if inputs.dtype != torch.float32 or inputs.dim() < 2:
        raise UserError(
            f"dataset '{name}': inputs must be uint8 images [N, C, H, W] or float32 [N, …], but have dtype "
            f"{inputs.dtype} and shape {tuple(inputs.shape)}; fedloom.data.from_arrays converts other arrays"
        )
    bad = [i + start for start in range(0, len(inputs), 8192) for i in _not_finite(inputs[start : start + 8192])]
    if bad:
        raise UserError(
            f"dataset '{name}': {len(bad)} of {len(inputs)} samples contain NaN or infinity, first sample {bad[0]}; "
            "remove them or fill the missing values"
        )


def _expect_multilabel(name: str, labels: Tensor, count: int, names: int) -> None:
    _expect(name, "labels", labels, torch.uint8, 2, count)
    if labels.shape[1] != names:
        raise UserError(f"dataset '{name}': {labels.shape[1]} labels per sample for {names} names of labels")
    if int(labels.max()) > 1:
        raise UserError(f"dataset '{name}': labels [N, {names}] must be 0 or 1, but contain {int(labels.max())}")


def _not_finite(inputs: Tensor) -> list[int]:
    found: list[int] = (~inputs.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
    return found


def _expect(name: str, field: str, value: Tensor, dtype: torch.dtype, dims: int, count: int | None = None) -> None:
    if value.dtype != dtype or value.dim() != dims:
        raise UserError(
            f"dataset '{name}': {field} must be {dtype} with {dims} dimension(s), "
            f"but has dtype {value.dtype} and shape {tuple(value.shape)}"
        )
    if count is not None and len(value) != count:
        raise UserError(f"dataset '{name}': {len(value)} {field} for {count} samples")


def _expect_range(name: str, field: str, value: Tensor, count: int, things: str) -> None:
    for extreme in (int(value.min()), int(value.max())):
        if not 0 <= extreme < count:
            where = int((value == extreme).nonzero()[0])
            raise UserError(
                f"dataset '{name}': {field} {extreme} of sample {where} is out of range (0 to {count - 1}, "
                f"for {count} {things})"
            )
