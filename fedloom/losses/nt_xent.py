"""NT-Xent, the loss of SimCLR (Chen et al., ICML 2020, https://arxiv.org/abs/2002.05709, Eq. 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def nt_xent(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    """Compute the contrast of each view with the other view of its image and all other views of the batch.

        ℓ_i = −log( exp(cos(z_i, z_j)/τ) / Σ_{k≠i} exp(cos(z_i, z_k)/τ) ),   j the other view of i

    Args:
        z1: Projections of the first views [B, D]; normalised here.
        z2: Projections of the second views [B, D]; normalised here.
        tau: Temperature τ.

    Returns:
        The mean over all 2B views, a scalar.

    Example:
        >>> z1, z2 = torch.randn(2, 32, 16)
        >>> loss = nt_xent(z1, z2, tau=0.07)
    """
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / tau).masked_fill(itself, torch.finfo(z.dtype).min / 2)
    other_view = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits, other_view)
