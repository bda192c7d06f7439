"""Regulariser of FedIntR: model-contrastive losses of several layers, weighted by similarity (its Eq. 2–6)."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.losses.model_contrastive import cosines
from fedloom.losses.precision import in_float32


@in_float32
def layerwise_contrastive(
    zs: Sequence[Tensor],
    zs_global: Sequence[Tensor],
    zs_previous: Sequence[Tensor],
    tau: float,
    similarity: Literal["sample", "batch"] = "sample",
    weights: Literal["softmax", "average"] = "softmax",
) -> Tensor:
    """Compute the weighted sum of the layers' model-contrastive losses.

        R = Σ_k α_k ℓ_k                          Eq. 5
        ℓ_k = −log σ((s_g^k − s_p^k)/τ)          Eq. 2, s_g^k = cos(z^k, z_g^k), s_p^k = cos(z^k, z_p^k)
        α = softmax over the layers of s_g^k/τ   Eq. 4

    The factor μ of Eq. 5 is left to the caller. Gradients flow through α, as in the authors' code.

    Args:
        zs: K projected layers of the model in training, each [B, D_k]; widths may differ.
        zs_global: The same layers of the received model, computed without gradient.
        zs_previous: The same layers of the client's previous model, computed without gradient.
        tau: Temperature τ of the losses and of the weights.
        similarity: "sample" takes loss and weights per sample, then the mean; "batch" averages each cosine first.
        weights: "softmax" (Eq. 4–5), or "average" with α_k = 1/K (Eq. 6).

    Returns:
        The regulariser R, a scalar.

    Raises:
        UserError: `similarity` or `weights` is not one of these values.

    Example:
        >>> z, z_global, z_previous = ([torch.randn(32, 16) for _ in range(3)] for _ in range(3))
        >>> loss = layerwise_contrastive(z, z_global, z_previous, tau=0.5)
    """
    if similarity not in ("sample", "batch"):
        raise UserError(f"similarity '{similarity}' is unknown: {nearest(similarity, ['sample', 'batch'])}")
    if weights not in ("softmax", "average"):
        raise UserError(f"weights '{weights}' is unknown: {nearest(weights, ['softmax', 'average'])}")
    to_global, to_previous = _cosines(zs, zs_global, zs_previous)
    if similarity == "batch":
        to_global, to_previous = to_global.mean(1, keepdim=True), to_previous.mean(1, keepdim=True)
    losses = -F.logsigmoid((to_global - to_previous) / tau)  # Eq. 2
    if weights == "average":
        return losses.mean()  # Eq. 6
    alpha = F.softmax(to_global / tau, dim=0)  # Eq. 4
    return (alpha * losses).sum(0).mean()  # Eq. 5


def _cosines(zs: Sequence[Tensor], *others: Sequence[Tensor]) -> list[Tensor]:
    """Return the cosines [K, B] with each of the other models (Eq. 3); layers of one width are stacked for speed."""
    if len({z.shape[1] for z in zs}) == 1:
        return cosines(torch.stack(tuple(zs)), *(torch.stack(tuple(other)) for other in others))
    each = [cosines(z, *theirs) for z, *theirs in zip(zs, *others, strict=True)]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]
