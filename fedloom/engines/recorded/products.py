"""Convolutions as matrix products: the fastest way on GPUs to do many small ones, each with different weights."""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedloom.core.torch_internals import rebatched, unbatched, vmap_level

Sizes = Sequence[int]
ALIGNED = 8
SMALL_PRODUCT, LONG_SUM = 64 * 128, 4096
"""A product of at most SMALL_PRODUCT entries, each a sum of at least LONG_SUM terms, leaves most of a GPU idle."""


class Products:
    """Convolutions of a step, forward and backward; both use the same patches.

    `fused` is for a compiler, which fuses many operations that would be slow individually.
    """

    def __init__(self, fused: bool = False) -> None:
        self._fused = fused
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def can(x: Tensor, dilation: Sizes, transposed: bool, groups: int) -> bool:
        """Return whether this is an ordinary 2-d convolution."""
        return x.dim() == 4 and groups == 1 and not transposed and set(dilation) == {1}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes) -> Tensor:
        """Compute aten::convolution."""
        patches = self._patches(x, weight, stride, padding)
        kernel = _as_patches(weight)
        column = kernel.new_zeros(len(kernel), 1) if bias is None else bias[:, None]
        rows = patches.flatten(0, 2) @ _aligned(torch.cat([kernel, column], 1)).t()
        images: Tensor = rows.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)
        return images

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute aten::convolution_backward: gradients of the input, the weight and the bias."""
        rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
        to_input = to_weight = to_bias = None
        if wanted[0]:
            patches = (rows @ _as_patches(weight)).unflatten(0, (len(x), *gradient.shape[2:]))
            added = _overlaid if self._fused else _overlaid_at_once
            to_input = added(patches.unflatten(3, (*weight.shape[2:], -1)), x.shape[2:], stride, padding)
        if wanted[1]:
            patches = self._patches(x, weight, stride, padding).flatten(0, 2)
            product, seen = _long_product(rows, patches, len(x)), math.prod(weight.shape[1:])
            to_weight = product[:, :seen].unflatten(1, (*weight.shape[2:], -1)).permute(0, 3, 1, 2)
            to_bias = product[:, seen]
        elif wanted[2]:
            to_bias = rows.sum(0)
        return to_input, to_weight, to_bias if wanted[2] else None

    def _patches(self, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
        """Return the patches [images, rows, columns, entries] that the kernel is applied to.

        Entries are the kernel's rows, columns and channels, followed by a one and zeros. The one is multiplied by the
        bias, and yields the gradient of the bias as a column of the weight's gradient.
        """
        key = (id(x), (*weight.shape[2:], *stride, *padding))
        if key not in self._known:
            self._known[key] = x, _seen(x, weight.shape[2:], stride, padding)
        return self._known[key][1]


def _long_product(rows: Tensor, patches: Tensor, images: int) -> Tensor:
    """Return rowsᵀ · patches. Small results of long sums are computed per image, to keep a GPU busy."""
    small = rows.shape[1] * patches.shape[1] <= SMALL_PRODUCT
    if not small or len(rows) < LONG_SUM or len(rows) // images < LONG_SUM // 16:
        return rows.t() @ patches
    each: Tensor = rows.unflatten(0, (images, -1)).transpose(1, 2) @ patches.unflatten(0, (images, -1))
    return each.sum(0)


def _seen(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Return the patches, by one Triton kernel on a GPU; a compiler-generated kernel takes three times as long."""
    all_rows = unbatched(x)
    if all_rows is not None and all_rows.is_cuda:  # inside vmap
        from fedloom.engines.recorded.kernels import unfold

        length = math.prod(kernel) * x.shape[1] + 1
        patches = unfold(all_rows, [*kernel], [*stride], [*padding], length + -length % ALIGNED)
        return rebatched(patches, vmap_level(x))
    padded = pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    pixels = padded.permute(0, 2, 3, 1).contiguous()
    count, *sides, channels = pixels.shape
    places = [(side - seen) // step + 1 for side, seen, step in zip(sides, kernel, stride, strict=True)]
    image, row, pixel, channel = pixels.stride()
    steps = (image, stride[0] * row, stride[1] * pixel, row, pixel, channel)
    windows = pixels.as_strided((count, *places, *kernel, channels), steps).flatten(3)
    return _aligned(pad(windows, (0, 1), value=1.0))


def _overlaid(patches: Tensor, image: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Sum patches [images, rows, columns, kernel rows, kernel columns, channels] into images.

    A sum over kernel positions, which a compiler fuses into one operation. col2im, which works pixel by pixel, takes
    several times as long.
    """
    exact = torch.promote_types(patches.dtype, torch.float32)
    (top, left), (rows, columns) = padding, image
    total: Tensor | None = None
    for i, j in product(range(patches.shape[3]), range(patches.shape[4])):
        place = _apart(_apart(patches[:, :, :, i, j], 1, stride[0]), 2, stride[1])
        _, down, across, _ = place.shape
        frame = (0, 0, j, columns + 2 * left - j - across, i, rows + 2 * top - i - down)
        part = pad(place, frame).to(exact)
        total = part if total is None else total + part
    assert total is not None
    return total[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2).to(patches.dtype)


def _overlaid_at_once(patches: Tensor, image: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Compute `_overlaid` without a compiler: by one Triton kernel on a GPU, otherwise by in-place sums."""
    all_rows = unbatched(patches)
    if all_rows is not None and all_rows.is_cuda:  # inside vmap
        from fedloom.engines.recorded.kernels import overlay

        images = overlay(all_rows.flatten(0, 1), image, stride, padding).unflatten(0, all_rows.shape[:2])
        return rebatched(images, vmap_level(patches)).permute(0, 3, 1, 2)
    exact = torch.promote_types(patches.dtype, torch.float32)
    count, down, across, height, width, channels = patches.shape
    (top, left), (rows, columns) = padding, image
    total = patches.new_zeros((count, rows + 2 * top, columns + 2 * left, channels), dtype=exact)
    for i, j in product(range(height), range(width)):
        place = total[:, i : i + stride[0] * down : stride[0], j : j + stride[1] * across : stride[1]]
        place.add_(patches[:, :, :, i, j])
    return total[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2).to(patches.dtype)


def _apart(patches: Tensor, dim: int, stride: int) -> Tensor:
    """Insert zeros between patches, so that they are at the positions of the kernel."""
    if stride == 1:
        return patches
    spaced = pad(patches.movedim(dim, -1).unsqueeze(-1), (0, stride - 1)).flatten(-2)
    return spaced[..., : 1 - stride].movedim(-1, dim)


def _as_patches(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 3, 1).flatten(1)


def _aligned(rows: Tensor) -> Tensor:
    """Append zeros to rows: products whose lengths are not multiples of eight use slow kernels."""
    missing = -rows.shape[-1] % ALIGNED
    return pad(rows, (0, missing)) if missing else rows
