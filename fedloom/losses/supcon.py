"""Supervised contrastive loss: RepPer Eq. 4–5, after Khosla et al., 2020 (https://arxiv.org/abs/2004.11362)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.losses.precision import in_float32


@in_float32
def supcon(z: Tensor, y: Tensor, tau: float, positives: Literal["in", "out"] = "in") -> Tensor:
    """Pulls samples of a class together and away from all others.

    A(j) are all samples but j, P(j) those of them with j's label; p_ja is the softmax over A(j) of z_j·z_a/τ.

        "in"   ℓ_j = −log( 1/|P(j)| Σ_{p∈P(j)} p_jp )      RepPer Eq. 5, Khosla's L_in
        "out"  ℓ_j = −1/|P(j)| Σ_{p∈P(j)} log p_jp         Khosla's L_out; FedStyle Eq. 2 up to a factor

    The mean over the batch is returned (Eq. 4 sums). An anchor without a positive adds zero to that mean.

    Args:
        z: representations of unit length [N, D]; with two views, N = 2B.
        y: labels [N].
        tau: temperature.
        positives: whether the mean over positives is inside or outside the logarithm.
    """
    if positives not in ("in", "out"):
        raise UserError(f"positives '{positives}' is unknown: {nearest(positives, ['in', 'out'])}")
    return anchor_losses(z, z, y, tau, positives).mean()


def anchor_losses(anchors: Tensor, others: Tensor, y: Tensor, tau: float, positives: Literal["in", "out"]) -> Tensor:
    """ℓ_j of each anchor [N]; `others` are the same rows, apart so that gradients can go to anchors alone."""
    # Finite where one would write −inf: a row that is masked throughout must not turn into NaN.
    never = torch.finfo(anchors.dtype).min / 2
    itself = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    positive = (y[:, None] == y) & ~itself
    count = positive.sum(1)

    logits = (anchors @ others.T / tau).masked_fill(itself, never)
    if positives == "in":
        of_positives = logits.masked_fill(~positive, never).logsumexp(1)
        losses = logits.logsumexp(1) - of_positives + count.clamp_min(1).log()
    else:
        log_p = F.log_softmax(logits, 1)
        losses = -torch.where(positive, log_p, 0).sum(1) / count.clamp_min(1)
    return torch.where(count > 0, losses, 0)
