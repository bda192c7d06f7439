"""Cosines of one set of vectors with several others."""

import torch.nn.functional as F
from torch import Tensor


def cosines(z: Tensor, *others: Tensor) -> list[Tensor]:
    """cos(z, other) along the last dimension, for each of the others; as F.cosine_similarity, but z is scaled once."""
    z = F.normalize(z, dim=-1, eps=1e-8)
    return [(z * F.normalize(other, dim=-1, eps=1e-8)).sum(-1) for other in others]
