"""Convolutions as matrix products: for many small ones at once, each with its own weights, GPUs have nothing faster."""

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
"""Entries of a product that leaves most of a GPU idle, and terms of their sums from which on it takes long."""


class Products:
    """Convolutions of a step, forward and backward; patches are laid out once for both.

    `fused` is for a compiler, which makes one operation of many that would take long one by one.
    """

    def __init__(self, fused: bool = False) -> None:
        self._fused = fused
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def can(x: Tensor, dilation: Sizes, transposed: bool, groups: int) -> bool:
        """Whether this is a plain convolution of images."""
        return x.dim() == 4 and groups == 1 and not transposed and set(dilation) == {1}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes) -> Tensor:
        """As aten::convolution."""
        patches = self._patches(x, weight, stride, padding)
        kernel = _as_patches(weight)
        column = kernel.new_zeros(len(kernel), 1) if bias is None else bias[:, None]
        rows = patches.flatten(0, 2) @ _aligned(torch.cat([kernel, column], 1)).t()
        images: Tensor = rows.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)
        return images

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As aten::convolution_backward: of the input, the weight and the bias."""
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
        """[images, rows, columns, what the kernel sees there: its rows, columns and channels, then a one and zeros].

        The one is multiplied by the bias, and in the gradient of the weight gives the bias its own.
        """
        key = (id(x), (*weight.shape[2:], *stride, *padding))
        if key not in self._known:
            self._known[key] = x, _seen(x, weight.shape[2:], stride, padding)
        return self._known[key][1]


def _long_product(rows: Tensor, patches: Tensor, images: int) -> Tensor:
    """rowsᵀ · patches; image by image where the result is small and its sums are long, to keep a GPU busy."""
    small = rows.shape[1] * patches.shape[1] <= SMALL_PRODUCT
    if not small or len(rows) < LONG_SUM or len(rows) // images < LONG_SUM // 16:
        return rows.t() @ patches
    each: Tensor = rows.unflatten(0, (images, -1)).transpose(1, 2) @ patches.unflatten(0, (images, -1))
    return each.sum(0)


def _seen(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """What the kernel sees: by one kernel on a GPU, compiled or not; a compiler's own takes three times as long."""
    all_rows = unbatched(x)
    if all_rows is not None and all_rows.is_cuda:  # inside vmap
        from fedloom.engines.cuda.kernels import unfold

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
    """Images of which patches [images, rows, columns, kernel's rows, its columns, channels] are added up.

    A sum over the kernel's places, which a compiler makes one operation of: col2im, pixel by pixel, takes several times
    as long.
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
    """The same without a compiler: by one kernel on a GPU, else by sums in place."""
    all_rows = unbatched(patches)
    if all_rows is not None and all_rows.is_cuda:  # inside vmap
        from fedloom.engines.cuda.kernels import overlay

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
    """With zeros between them, so that they stand where the kernel stood."""
    if stride == 1:
        return patches
    spaced = pad(patches.movedim(dim, -1).unsqueeze(-1), (0, stride - 1)).flatten(-2)
    return spaced[..., : 1 - stride].movedim(-1, dim)


def _as_patches(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 3, 1).flatten(1)


def _aligned(rows: Tensor) -> Tensor:
    """With zeros at the end of rows: products of lengths that are no multiples of eight take slow ways."""
    missing = -rows.shape[-1] % ALIGNED
    return pad(rows, (0, missing)) if missing else rows
