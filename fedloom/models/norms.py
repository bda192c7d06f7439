"""Normalisation layers by name, for networks with an option `norm`."""

from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "layer"]
"""Batch-norm; group norm with up to 32 groups; layer norm over channels and pixels, which is one group."""
GROUPS = 32
"""Maximum number of groups (Wu and He, "Group Normalization", ECCV 2018, Table 3)."""


def norm2d(kind: Norm, channels: int) -> nn.Module:
    """Return a normalisation layer for maps [B, channels, H, W].

    Args:
        kind: `batch`; `group`: the largest number of groups up to 32 that divides the channels; `layer`: one group.
        channels: Number of channels.

    Example:
        >>> norm2d("group", 48)
        GroupNorm(24, 48, eps=1e-05, affine=True)
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    most = 1 if kind == "layer" else GROUPS
    groups = max(count for count in range(1, most + 1) if channels % count == 0)
    return nn.GroupNorm(groups, channels)
