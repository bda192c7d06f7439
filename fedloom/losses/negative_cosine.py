"""Loss of SimSiam (Chen and He, CVPR 2021, https://arxiv.org/abs/2011.10566, Eq. 4)."""

import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def negative_cosine(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """Compute the negative cosine between each view's prediction and the other view's projection.

        L = −½ cos(p1, stopgrad(z2)) − ½ cos(p2, stopgrad(z1)),   mean over the batch

    Args:
        p1: Predictions from the first views [B, D].
        p2: Predictions from the second views [B, D].
        z1: Projections of the first views [B, D]; no gradient flows into them.
        z2: Projections of the second views [B, D]; no gradient flows into them.

    Returns:
        The loss, a scalar in [−1, 1].

    Example:
        >>> p1, p2, z1, z2 = torch.randn(4, 32, 16)
        >>> loss = negative_cosine(p1, p2, z1, z2)
    """
    first = F.cosine_similarity(p1, z2.detach(), dim=1)
    second = F.cosine_similarity(p2, z1.detach(), dim=1)
    return -(first + second).mean() / 2
