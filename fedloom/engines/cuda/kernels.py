# mypy: ignore-errors
"""A Triton kernel: adds up the patches of a convolution's gradient into images, where steps are not compiled.

Imported where it is used: Triton comes with torch's CUDA builds alone.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _add_up(
    patches, out, count, rows, columns, down, across, channels, stride_y, stride_x, top, left,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    channel, pixel = (place % channels).to(tl.int32), (place // channels).to(tl.int32)
    column, row, number = pixel % columns, (pixel // columns) % rows, (pixel // (columns * rows)).to(tl.int64)
    total = tl.zeros((block,), dtype=tl.float32)
    for i in tl.static_range(height):
        y = row + top - i
        for j in tl.static_range(width):
            x = column + left - j
            fits = (y >= 0) & (x >= 0) & (y % stride_y == 0) & (x % stride_x == 0)
            fits = inside & fits & (y // stride_y < down) & (x // stride_x < across)
            patch = (number * down + y // stride_y) * across + x // stride_x
            source = (patch * (height * width) + (i * width + j)) * channels + channel
            total += tl.load(patches + source, mask=fits, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def overlay(patches: Tensor, image: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Images [N, rows, columns, channels] of patches [N, down, across, height, width, channels], on a GPU.

    Every patch is read once; sums in place, one for each place of the kernel, would read and write images each time.
    """
    count, down, across, height, width, channels = patches.shape
    rows, columns = image
    out = torch.empty(count, rows, columns, channels, dtype=patches.dtype, device=patches.device)
    _add_up[(-(-out.numel() // BLOCK),)](
        patches.contiguous(), out, out.numel(), rows, columns, down, across, channels, *stride, *padding,
        height=height, width=width, block=BLOCK,
    )  # fmt: skip
    return out
