"""SimSiam's loss (Chen & He, 2021, https://arxiv.org/abs/2011.10566, Eq. 4)."""

import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def negative_cosine(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """A prediction from one view should point to the projection of the other.

        L = −½ cos(p1, stopgrad(z2)) − ½ cos(p2, stopgrad(z1)),   mean over the batch

    Args:
        p1: predictions from the first views [B, D].
        p2: predictions from the second views [B, D].
        z1: projections of the first views [B, D]; the gradient is stopped here.
        z2: projections of the second views [B, D]; likewise.
    """
    first = F.cosine_similarity(p1, z2.detach(), dim=1)
    second = F.cosine_similarity(p2, z1.detach(), dim=1)
    return -(first + second).mean() / 2
