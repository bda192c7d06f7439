"""InfoNCE with class representations (FedCRL, Eq. 11–12; after van den Oord et al., arXiv:1807.03748, 2018)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def info_nce(z: Tensor, prototypes: Tensor, y: Tensor, tau: float, known: Tensor | None = None) -> Tensor:
    """Compute the contrast of each representation with the prototype of its class and those of other classes.

        ℓ_j = −log( exp(cos(z_j, ω_{y_j})/τ) / Σ_c exp(cos(z_j, ω_c)/τ) ),   c over the known classes

    A sample of an unknown class has no positive and adds zero to the mean over the batch.

    Args:
        z: Representations [B, D]; normalised here.
        prototypes: Global class representations ω [C, D]; normalised here. Rows of unknown classes have no effect.
        y: Labels [B].
        tau: Temperature τ.
        known: Mask of the classes that have a prototype, bool [C]; by default all classes.

    Returns:
        The mean over the batch, a scalar.

    Example:
        >>> z, prototypes, y = torch.randn(32, 16), torch.randn(10, 16), torch.randint(10, (32,))
        >>> loss = info_nce(z, prototypes, y, tau=0.1)
    """
    logits = F.normalize(z, dim=1) @ F.normalize(prototypes, dim=1).T / tau
    if known is None:
        return F.cross_entropy(logits, y)
    # Finite instead of −inf: if no class is known, the whole row is masked, which would give NaN.
    logits = logits.masked_fill(~known, torch.finfo(logits.dtype).min / 2)
    return torch.where(known[y], F.cross_entropy(logits, y, reduction="none"), 0).mean()
