"""Loss of Barlow Twins (Zbontar et al., ICML 2021, https://arxiv.org/abs/2103.03230, Eq. 1–2)."""

import torch
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def barlow_twins(z1: Tensor, z2: Tensor, lambd: float) -> Tensor:
    """Compute the distance of the cross-correlation of two views' features from the identity matrix.

        L = Σ_i (1 − C_ii)² + λ Σ_i Σ_{j≠i} C_ij²,   C = correlation over the batch of z1's and z2's columns

    ε = 1e-5 is added to the variances, as in the authors' batch-norm, so that a constant feature causes no NaN.

    Args:
        z1: Projections of the first views [B, D].
        z2: Projections of the second views [B, D].
        lambd: Weight λ of the redundancy term; 0.005 in the paper.

    Returns:
        The loss, a scalar.

    Example:
        >>> z = torch.randn(64, 16)
        >>> loss = barlow_twins(z, z + 0.1 * torch.randn(64, 16), lambd=0.005)
    """
    correlation = _standardised(z1).T @ _standardised(z2) / len(z1)
    diagonal = correlation.diagonal()
    invariance = (1 - diagonal).square().sum()
    same = torch.eye(len(diagonal), dtype=torch.bool, device=z1.device)
    redundancy = correlation.masked_fill(same, 0).square().sum()
    return invariance + lambd * redundancy


def _standardised(z: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return centred * (centred.square().mean(0) + 1e-5).rsqrt()
