# mypy: ignore-errors
"""Triton kernels for training steps of many clients: unfolding for convolutions, and max-pooling.

Images have shape [clients, images, channels, rows, columns] with any strides; results are channels-last. A program
writes a tile: some pixels (or patches) by some of their entries. So integer divisions, which would take longer than
memory accesses, are done once per row or column of the tile. Import this module lazily: only torch's CUDA builds
include Triton.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WIDTH = 1024, 32
"""Elements that a program writes, and maximum number of them per pixel."""
Sizes = Sequence[int]


@triton.jit
def _tile(length: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):
    """Return the pixels [block / wide, 1] and entries [1, wide] of this program, of `length` entries in total."""
    groups: tl.constexpr = (length + wide - 1) // wide
    program = tl.program_id(0)
    pixels = (program // groups) * (block // wide) + tl.arange(0, block // wide)[:, None]
    entries = (program % groups) * wide + tl.arange(0, wide)[None, :]
    return pixels, entries


@triton.jit
def _unfold(
    images, out, count, each, s_client, s_image, s_channel, s_row, s_column, stride_y, stride_x, top, left,
    down: tl.constexpr, across: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, channels: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, length: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    patch, entry = _tile(length, wide, block)
    seen: tl.constexpr = height * width * channels
    channel, i, j = entry % channels, entry // (channels * width), (entry // channels) % width
    number, y, x = patch // (across * down), patch // across % down * stride_y - top, patch % across * stride_x - left
    fits = (patch < count) & (entry < seen) & (y + i >= 0) & (y + i < rows) & (x + j >= 0) & (x + j < columns)
    start = (number // each).to(tl.int64) * s_client + (number % each).to(tl.int64) * s_image + y * s_row + x * s_column
    value = tl.load(images + start + (channel * s_channel + i * s_row + j * s_column), mask=fits, other=0.0)
    value = tl.where(entry == seen, 1.0, value)
    tl.store(out + patch.to(tl.int64) * length + entry, value, mask=(patch < count) & (entry < length))


@torch.library.custom_op("fedloom::unfold", mutates_args=())
def unfold(images: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], length: int) -> Tensor:
    """Return the patches that a kernel is applied to, [clients, images, down, across, length].

    Entries are ordered by the kernel's rows, columns and channels, followed by a one and zeros up to `length`. For a
    compiler this is one opaque operation.
    """
    clients, each, channels, rows, columns = images.shape
    down, across = _places((rows, columns), kernel, stride, padding)
    out = images.new_empty(clients, each, down, across, length)
    grid, tile = _grid(out)
    _unfold[grid](
        images, out, out.numel() // length, each, *images.stride(), *stride, *padding,
        down, across, rows, columns, channels, *kernel, length, **tile,
    )  # fmt: skip
    return out


@unfold.register_fake
def _(images, kernel, stride, padding, length):
    return images.new_empty(*images.shape[:2], *_places(images.shape[3:], kernel, stride, padding), length)


@triton.jit
def _overlay(
    patches, out, count, stride_y, stride_x, top, left,
    down: tl.constexpr, across: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, channels: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    pixel, channel = _tile(channels, wide, block)
    inside = (pixel < count) & (channel < channels)
    column, row, number = pixel % columns, pixel // columns % rows, pixel // (columns * rows)
    total = tl.zeros((block // wide, wide), dtype=tl.float32)
    for i in tl.static_range(height):
        y = row + top - i
        for j in tl.static_range(width):
            x = column + left - j
            fits = (y >= 0) & (x >= 0) & (y % stride_y == 0) & (x % stride_x == 0)
            fits = fits & (y // stride_y < down) & (x // stride_x < across)
            patch = ((number * down + y // stride_y) * across + x // stride_x).to(tl.int64)
            start = (patch * (height * width) + (i * width + j)) * channels
            total += tl.load(patches + start + channel, mask=inside & fits, other=0.0).to(tl.float32)
    tl.store(out + pixel.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=inside)


def overlay(patches: Tensor, image: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Sum patches [N, down, across, height, width, channels] into images [N, rows, columns, channels].

    Every patch is read once. In-place sums per kernel position would read and write the images each time.
    """
    count, down, across, height, width, channels = patches.shape
    out = patches.new_empty(count, *image, channels)
    grid, tile = _grid(out)
    _overlay[grid](
        patches.contiguous(), out, out.numel() // channels, *stride, *padding,
        down, across, *image, channels, height, width, **tile,
    )  # fmt: skip
    return out


@triton.jit
def _pool(
    images, out, where, count, each, s_client, s_image, s_channel, s_row, s_column, stride_y, stride_x, top, left,
    down: tl.constexpr, across: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, channels: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    window, channel = _tile(channels, wide, block)
    inside = (window < count) & (channel < channels)
    number = window // (across * down)
    start = (number // each).to(tl.int64) * s_client + (number % each).to(tl.int64) * s_image + channel * s_channel
    best = tl.full((block // wide, wide), float("-inf"), dtype=images.dtype.element_ty)
    index = tl.full((block // wide, wide), -1, dtype=tl.int32)
    for i in tl.static_range(height):
        y = window // across % down * stride_y + i - top
        for j in tl.static_range(width):
            x = window % across * stride_x + j - left
            fits = inside & (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
            value = tl.load(images + start + (y * s_row + x * s_column), mask=fits, other=float("-inf"))
            taken = fits & ((value > best) | (value != value) | (index < 0))
            best, index = tl.where(taken, value, best), tl.where(taken, i * width + j, index)
    place = window.to(tl.int64) * channels + channel
    tl.store(out + place, best, mask=inside)
    tl.store(where + place, index.to(tl.int8), mask=inside)


def max_pool(images: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes) -> tuple[Tensor, Tensor]:
    """Return the largest values [clients, images, down, across, channels], and their positions in the kernel."""
    clients, each, channels, rows, columns = images.shape
    down, across = _places((rows, columns), kernel, stride, padding)
    out = images.new_empty(clients, each, down, across, channels)
    where = torch.empty_like(out, dtype=torch.int8)
    grid, tile = _grid(out)
    _pool[grid](
        images, out, where, out.numel() // channels, each, *images.stride(), *stride, *padding,
        down, across, rows, columns, channels, *kernel, **tile,
    )  # fmt: skip
    return out, where


@triton.jit
def _pool_back(
    gradient, where, out, count, each, s_client, s_image, s_channel, s_row, s_column, stride_y, stride_x, top, left,
    down: tl.constexpr, across: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, channels: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    pixel, channel = _tile(channels, wide, block)
    inside = (pixel < count) & (channel < channels)
    column, row, number = pixel % columns, pixel // columns % rows, pixel // (columns * rows)
    start = (number // each).to(tl.int64) * s_client + (number % each).to(tl.int64) * s_image + channel * s_channel
    total = tl.zeros((block // wide, wide), dtype=tl.float32)
    for i in tl.static_range(height):
        y = row + top - i
        for j in tl.static_range(width):
            x = column + left - j
            fits = (y >= 0) & (x >= 0) & (y % stride_y == 0) & (x % stride_x == 0)
            fits = inside & fits & (y // stride_y < down) & (x // stride_x < across)
            window = ((number * down + y // stride_y) * across + x // stride_x).to(tl.int64)
            chosen = fits & (tl.load(where + window * channels + channel, mask=fits, other=-1) == i * width + j)
            source = gradient + start + (y // stride_y * s_row + x // stride_x * s_column)
            total += tl.load(source, mask=chosen, other=0.0).to(tl.float32)
    tl.store(out + pixel.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=inside)


def max_pool_backward(
    gradient: Tensor, where: Tensor, image: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes
) -> Tensor:
    """Return the gradient of images [clients, images, rows, columns, channels]."""
    clients, each, channels, down, across = gradient.shape
    out = gradient.new_empty(clients, each, *image, channels)
    grid, tile = _grid(out)
    _pool_back[grid](
        gradient, where, out, out.numel() // channels, each, *gradient.stride(), *stride, *padding,
        down, across, *image, channels, *kernel, **tile,
    )  # fmt: skip
    return out


def _places(image: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes) -> list[int]:
    """Return how many times a kernel fits into an image vertically and horizontally."""
    sizes = zip(image, kernel, stride, padding, strict=True)
    return [(side + 2 * around - seen) // step + 1 for side, seen, step, around in sizes]


def _grid(out: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return the number of programs for all of `out`, and the size of their tiles."""
    length = out.shape[-1]
    wide = min(WIDTH, triton.next_power_of_2(length))
    pixels = out.numel() // length
    return (-(-pixels // (BLOCK // wide)) * -(-length // wide),), {"wide": wide, "block": BLOCK}
