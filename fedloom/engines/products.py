"""Convolutions as matrix products: for many small ones at once, each with its own weights, GPUs have nothing faster."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Sizes = Sequence[int]


class Products:
    """Convolutions of a step, forward and backward; patches are laid out once for both."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def can(x: Tensor, dilation: Sizes, transposed: bool, groups: int) -> bool:
        """Whether this is a plain convolution of images."""
        return x.dim() == 4 and groups == 1 and not transposed and set(dilation) == {1}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes) -> Tensor:
        """As aten::convolution."""
        patches = self._patches(x, weight, stride, padding)
        rows = patches.flatten(0, 2) @ _aligned(_as_patches(weight)).t()
        if bias is not None:
            rows = rows + bias
        return rows.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As aten::convolution_backward: of the input, the weight and the bias."""
        rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
        to_input = to_weight = None
        if wanted[0]:
            patches = (rows @ _as_patches(weight)).unflatten(0, (len(x), *gradient.shape[2:]))
            to_input = _overlaid(patches.unflatten(3, (*weight.shape[2:], -1)), x.shape[2:], stride, padding)
        if wanted[1]:
            patches = self._patches(x, weight, stride, padding).flatten(0, 2)
            height, width = weight.shape[2:]
            seen = height * width * x.shape[1]
            to_weight = (rows.t() @ patches)[:, :seen].unflatten(1, (height, width, -1)).permute(0, 3, 1, 2)
        return to_input, to_weight, rows.sum(0) if wanted[2] else None

    def _patches(self, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
        """[images, rows, columns, what the kernel sees there: its rows, columns and channels; zeros up to eight]."""
        key = (id(x), (*weight.shape[2:], *stride, *padding))
        if key not in self._known:
            height, width = weight.shape[2:]
            padded = pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
            windows = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])
            self._known[key] = x, _aligned(windows.permute(0, 2, 3, 4, 5, 1).flatten(3))
        return self._known[key][1]


def _overlaid(patches: Tensor, image: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Images of which patches [images, rows, columns, kernel's rows, its columns, channels] are added up.

    One sum for each place of the kernel: as col2im does it, pixel by pixel, it takes several times as long.
    """
    count, down, across, height, width, channels = patches.shape
    (top, left), (rows, columns) = padding, image
    exact = torch.promote_types(patches.dtype, torch.float32)
    total = patches.new_zeros(count, rows + 2 * top, columns + 2 * left, channels, dtype=exact)
    for i in range(height):
        for j in range(width):
            place = total[:, i : i + stride[0] * down : stride[0], j : j + stride[1] * across : stride[1]]
            place.add_(patches[:, :, :, i, j])
    return total[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2).to(patches.dtype)


def _as_patches(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 3, 1).flatten(1)


def _aligned(rows: Tensor) -> Tensor:
    """With zeros at the end of rows up to a multiple of eight: products of other lengths take slow ways."""
    missing = -rows.shape[-1] % 8
    return pad(rows, (0, missing)) if missing else rows
