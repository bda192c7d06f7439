"""Augmentations of inputs of any shape [B, …], with separate random numbers for each sample."""

import torch
from torch import Tensor

from fedloom.core.rng import Random


def gaussian(x: Tensor, std: float, random: Random) -> Tensor:
    """Add normal noise to inputs of any shape. Unlike `noise`, the result is not clipped to [0, 1].

    Args:
        x: Inputs [B, …].
        std: Standard deviation of the noise, in the units of the inputs.
        random: Random numbers.

    Returns:
        Inputs [B, …].
    """
    return x + std * random.normal(tuple(x.shape)).to(x.dtype)


def mask(x: Tensor, p: float, random: Random) -> Tensor:
    """Set each value to zero with probability p, in inputs of any shape.

    Args:
        x: Inputs [B, …].
        p: Probability for each value.
        random: Random numbers.

    Returns:
        Inputs [B, …].
    """
    return torch.where(random.chosen(tuple(x.shape), p), 0, x)


def shift(x: Tensor, share: float, random: Random) -> Tensor:
    """Rotate signals along their last dimension by up to a share of its length, to the left or the right.

    Args:
        x: Inputs [B, …, L].
        share: Largest shift as a share of L.
        random: Random numbers.

    Returns:
        Inputs [B, …, L].
    """
    length = x.shape[-1]
    most = int(share * length)
    by = random.integers(2 * most + 1, (len(x), 1)) - most
    index = (torch.arange(length, device=x.device) + by) % length
    return x.gather(-1, index.reshape(len(x), *[1] * (x.dim() - 2), length).expand(x.shape))
