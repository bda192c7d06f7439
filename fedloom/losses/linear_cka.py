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
    if a.shape[1] * b.shape[1] <= len(a) ** 2:  # through whichever products are smaller: over features, or over samples
        own_a, own_b, common = (m.square().sum() for m in (a.T @ a, b.T @ b, b.T @ a))
    else:
        kernel, other = a @ a.T, b @ b.T
        own_a, own_b, common = (m.sum() for m in (kernel * kernel, other * other, kernel * other))
    # Clamped before the root, whose gradient at zero is infinite; on unit scale the product is ≥ 1/(D·E).
    return common / (own_a * own_b).clamp_min(1e-16).sqrt()


def _centred(a: Tensor) -> Tensor:
    """Centred columns on unit scale: CKA does not see the scale, and fourth powers of it could overflow."""
    a = a - a.mean(0)
    return a / torch.linalg.vector_norm(a).clamp_min(1e-8)
