"""Prototypes: what a class looks like to a network."""

import torch
from torch import Tensor


@torch.no_grad()
def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean representation and number of samples of every class ([C, k] and [C]; zeros for absent classes)."""
    member = torch.nn.functional.one_hot(y, classes).to(z.dtype)
    counts = member.sum(0)
    return member.T @ z / counts.clamp_min(1)[:, None], counts
