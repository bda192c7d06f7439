"""Max-pooling for many clients at once. torch's version stores 64-bit indices and has a slow backward pass."""

from collections.abc import Sequence
from operator import getitem

import torch
from torch import Tensor, fx

from fedloom.core.torch_internals import rebatched, unbatched, vmap_level

Sizes = int | Sequence[int]
PLACES = 127
"""Maximum number of kernel positions that fit into an int8."""


def pooled(
    node: fx.Node, x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Compute aten::max_pool2d_with_indices with int8 positions; None if our kernel does not support the arguments."""
    rows, (height, width) = unbatched(x), _pair(kernel)
    ours = not ceil_mode and _pair(dilation) == (1, 1) and height * width <= PLACES and _places_are_hidden(node)
    if rows is None or not rows.is_cuda or rows.dim() != 5 or not ours:
        return None
    from fedloom.engines.recorded.kernels import max_pool

    values, places = max_pool(rows, (height, width), _pair(stride or kernel), _pair(padding))
    level = vmap_level(x)
    return rebatched(values, level).permute(0, 3, 1, 2), rebatched(places, level)


def pooled_backward(
    gradient: Tensor, x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, _: Sizes, __: bool, places: Tensor
) -> Tensor:
    """Compute aten::max_pool2d_with_indices_backward, given the positions of `pooled`."""
    from fedloom.engines.recorded.kernels import max_pool_backward

    where, rows = unbatched(places), unbatched(gradient)
    assert where is not None
    rows = gradient.expand(len(where), *gradient.shape) if rows is None else rows
    images = max_pool_backward(rows, where, x.shape[2:], _pair(kernel), _pair(stride or kernel), _pair(padding))
    return rebatched(images, vmap_level(places)).permute(0, 3, 1, 2)


def _places_are_hidden(node: fx.Node) -> bool:
    """Return whether only the backward pass reads the positions of maxima."""
    places = [user for user in node.users if user.target is getitem and user.args[1] == 1]
    readers = {reader.target for user in places for reader in user.users}
    return readers <= {torch.ops.aten.max_pool2d_with_indices_backward.default}


def _pair(size: Sizes) -> tuple[int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes[0], sizes[-1]
