"""Linear centred kernel alignment (Kornblith et al., 2019, https://arxiv.org/abs/1905.00414, §3)."""

import torch
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """How alike two representations of the same samples are: 1 up to rotation and scale, 0 if uncorrelated.

        CKA = ‖BᵀA‖_F² / (‖AᵀA‖_F ‖BᵀB‖_F),   A and B with centred columns

    Zero where one of them is the same for every sample.

    Args:
        a: activations [N, D]; rows are samples.
        b: activations of the same samples [N, E].
    """
    a, b = _centred(a), _centred(b)
    # Clamped before the root, whose gradient at zero is infinite; on unit scale the product is ≥ 1/(D·E).
    norms = (_squared_product(a, a) * _squared_product(b, b)).clamp_min(1e-16).sqrt()
    return _squared_product(a, b) / norms


def _centred(a: Tensor) -> Tensor:
    """Centred columns on unit scale: CKA does not see the scale, and fourth powers of it could overflow."""
    a = a - a.mean(0)
    return a / torch.linalg.vector_norm(a).clamp_min(1e-8)


def _squared_product(a: Tensor, b: Tensor) -> Tensor:
    """‖BᵀA‖_F², through whichever of the products is smaller: over features, or over samples."""
    if a.shape[1] * b.shape[1] <= len(a) ** 2:
        return (b.T @ a).square().sum()
    return ((a @ a.T) * (b @ b.T)).sum()
