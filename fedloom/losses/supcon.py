"""Supervised contrastive loss (Khosla et al., NeurIPS 2020, https://arxiv.org/abs/2004.11362; RepPer, Eq. 4–5)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.losses.precision import in_float32


@in_float32
def supcon(z: Tensor, y: Tensor, tau: float, positives: Literal["in", "out"] = "in") -> Tensor:
    """Compute the contrast of each sample with the samples of its class and all other samples.

    A(j) are all samples except j, P(j) the samples in A(j) with j's label, and p_ja is the softmax over A(j) of
    z_j·z_a/τ.

        "in"   ℓ_j = −log( 1/|P(j)| Σ_{p∈P(j)} p_jp )      RepPer Eq. 5, Khosla's L_in
        "out"  ℓ_j = −1/|P(j)| Σ_{p∈P(j)} log p_jp         Khosla's L_out; FedStyle Eq. 2 up to a factor

    An anchor without a positive adds zero to the mean over the batch.

    Args:
        z: Normalised representations [N, D]; with two views per image, N = 2B.
        y: Labels [N].
        tau: Temperature τ.
        positives: Whether the mean over positives is inside ("in") or outside ("out") the logarithm.

    Returns:
        The mean over the batch, a scalar (Eq. 4 has the sum).

    Raises:
        UserError: `positives` is not one of these values.

    Example:
        >>> z, y = torch.nn.functional.normalize(torch.randn(32, 16)), torch.randint(10, (32,))
        >>> loss = supcon(z, y, tau=0.1)
    """
    if positives not in ("in", "out"):
        raise UserError(f"positives '{positives}' is unknown: {nearest(positives, ['in', 'out'])}")
    return anchor_losses(z, z, y, tau, positives).mean()


@in_float32
def supcon_sum(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """Compute −1/(N−1) Σ_j Σ_{p∈P(j)} log p_jp: Eq. 2 of FedStyle as printed, which grows with the batch.

    Args:
        z: Normalised representations [N, D].
        y: Labels [N].
        tau: Temperature τ.

    Returns:
        A scalar.

    Example:
        >>> z, y = torch.nn.functional.normalize(torch.randn(32, 16), dim=1), torch.arange(32) % 2
        >>> loss = supcon_sum(z, y, tau=0.07)
    """
    positives = (y[:, None] == y).sum(1) - 1
    return (positives * anchor_losses(z, z, y, tau, "out")).sum() / max(1, len(z) - 1)


def anchor_losses(anchors: Tensor, others: Tensor, y: Tensor, tau: float, positives: Literal["in", "out"]) -> Tensor:
    """Return ℓ_j of each anchor [N]; `others` are the same rows, separate so that tests can detach them."""
    # Finite instead of −inf: a row that is masked completely would give NaN.
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
