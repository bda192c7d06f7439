"""Loss of BYOL (Grill et al., NeurIPS 2020, https://arxiv.org/abs/2006.07733, Eq. 2)."""

import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def byol(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """Compute the distance of each view's prediction from the target network's projection of the other view.

        L = ‖p̄1 − z̄2‖² + ‖p̄2 − z̄1‖² = 4 − 2 cos(p1, z2) − 2 cos(p2, z1),   mean over the batch

    Args:
        p1: Predictions of the online network from the first views [B, D].
        p2: Predictions of the online network from the second views [B, D].
        z1: Projections of the first views by the target network [B, D]; no gradient flows into them.
        z2: Projections of the second views by the target network [B, D]; no gradient flows into them.

    Returns:
        The loss, a scalar.

    Example:
        >>> p1, p2, z1, z2 = torch.randn(4, 32, 16)
        >>> loss = byol(p1, p2, z1, z2)
    """
    first = F.cosine_similarity(p1, z2.detach(), dim=1)
    second = F.cosine_similarity(p2, z1.detach(), dim=1)
    return (4 - 2 * first - 2 * second).mean()
