"""BYOL's loss (Grill et al., 2020, https://arxiv.org/abs/2006.07733, Eq. 2)."""

import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def byol(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """A prediction from one view should match the target network's projection of the other; both ways summed.

        L = ‖p̄1 − z̄2‖² + ‖p̄2 − z̄1‖² = 4 − 2 cos(p1, z2) − 2 cos(p2, z1),   mean over the batch

    Args:
        p1: the online network's predictions from the first views [B, D].
        p2: from the second views [B, D].
        z1: the target network's projections of the first views [B, D]; the gradient is stopped here.
        z2: of the second views [B, D]; likewise.
    """
    first = F.cosine_similarity(p1, z2.detach(), dim=1)
    second = F.cosine_similarity(p2, z1.detach(), dim=1)
    return (4 - 2 * first - 2 * second).mean()
