"""SimCLR's loss (Chen et al., 2020, https://arxiv.org/abs/2002.05709, Eq. 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def nt_xent(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    """Two views of an image are each other's positive; the other 2B − 2 views of the batch are negatives.

        ℓ_i = −log( exp(cos(z_i, z_j)/τ) / Σ_{k≠i} exp(cos(z_i, z_k)/τ) ),   j the other view of i

    The mean over all 2B anchors is returned.

    Args:
        z1: projections of the first views [B, D]; any length.
        z2: projections of the second views [B, D].
        tau: temperature.
    """
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / tau).masked_fill(itself, torch.finfo(z.dtype).min / 2)
    other_view = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits, other_view)
