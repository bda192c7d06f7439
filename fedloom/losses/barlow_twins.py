"""Barlow Twins' loss (Zbontar et al., 2021, https://arxiv.org/abs/2103.03230, Eq. 1–2)."""

import torch
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def barlow_twins(z1: Tensor, z2: Tensor, lambd: float) -> Tensor:
    """Makes the correlation of two views' features the identity: invariant and without redundancy.

        L = Σ_i (1 − C_ii)² + λ Σ_i Σ_{j≠i} C_ij²,   C = correlation over the batch of z1's and z2's columns

    Variances get batch-norm's ε = 1e-5, as in the authors' code, so that a collapsed feature does no harm.

    Args:
        z1: projections of the first views [B, D].
        z2: projections of the second views [B, D].
        lambd: weight of the redundancy term; the paper has 0.005.
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
