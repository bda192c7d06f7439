"""Linear centred kernel alignment, CKA (Kornblith et al., ICML 2019, https://arxiv.org/abs/1905.00414, §3)."""

import torch
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """Compute the similarity of two representations of the same samples.

        CKA = ‖BᵀA‖_F² / (‖AᵀA‖_F ‖BᵀB‖_F),   A and B with centred columns

    It is 1 if the representations are equal up to rotation and scale, and 0 if they are uncorrelated or one of them is
    the same for every sample.

    Args:
        a: Activations [N, D]; rows are samples.
        b: Activations of the same samples [N, E].

    Returns:
        The similarity in [0, 1], a scalar.

    Example:
        >>> a = torch.randn(32, 16)
        >>> round(linear_cka(a, 2 * a).item(), 4)
        1.0
    """
    a, b = _centred(a), _centred(b)
    if a.shape[1] * b.shape[1] <= len(a) ** 2:  # use the smaller products: [D, E] over features or [N, N] over samples
        own_a, own_b, common = (m.square().sum() for m in (a.T @ a, b.T @ b, b.T @ a))
    else:
        kernel, other = a @ a.T, b @ b.T
        own_a, own_b, common = (m.sum() for m in (kernel * kernel, other * other, kernel * other))
    # Clamp before the root, whose gradient at zero is infinite. With unit norms the product is at least 1/(D·E).
    return common / (own_a * own_b).clamp_min(1e-16).sqrt()


def _centred(a: Tensor) -> Tensor:
    """Centre the columns and scale to unit norm. CKA does not depend on the scale, whose fourth power may overflow."""
    a = a - a.mean(0)
    return a / torch.linalg.vector_norm(a).clamp_min(1e-8)
