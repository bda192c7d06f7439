"""InfoNCE against class representations: FedCRL Eq. 11–12, after van den Oord et al., 2018."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def info_nce(z: Tensor, prototypes: Tensor, y: Tensor, tau: float, known: Tensor | None = None) -> Tensor:
    """Draws a representation to its class's global one and away from those of the other classes.

        ℓ_j = −log( exp(cos(z_j, ω_{y_j})/τ) / Σ_c exp(cos(z_j, ω_c)/τ) ),   c over the known classes

    The mean over the batch is returned; a sample of an unknown class has no positive and adds zero to it.

    Args:
        z: representations [B, D]; any length.
        prototypes: global class representations ω [C, D]; any length; rows of unknown classes are never read.
        y: labels [B].
        tau: temperature.
        known: which classes somebody has sent, bool [C]; None means all.
    """
    logits = F.normalize(z, dim=1) @ F.normalize(prototypes, dim=1).T / tau
    if known is None:
        return F.cross_entropy(logits, y)
    # Finite where one would write −inf: with no class known, a row is masked throughout.
    logits = logits.masked_fill(~known, torch.finfo(logits.dtype).min / 2)
    return torch.where(known[y], F.cross_entropy(logits, y, reduction="none"), 0).mean()
