"""Model-contrastive loss (MOON: Li et al., CVPR 2021, https://arxiv.org/abs/2103.16257, Eq. 3; FedIntR, Eq. 2)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.losses.precision import in_float32


def cosines(z: Tensor, *others: Tensor) -> list[Tensor]:
    """Return cos(z, other) along the last dimension for each other tensor; z is normalised only once."""
    z = F.normalize(z, dim=-1, eps=1e-8)
    return [(z * F.normalize(other, dim=-1, eps=1e-8)).sum(-1) for other in others]


@in_float32
def model_contrastive(
    z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float, similarity: Literal["sample", "batch"] = "sample"
) -> Tensor:
    """Compute the contrast of a representation with the global model's and the previous local model's.

        ℓ = −log( exp(s_g/τ) / (exp(s_g/τ) + exp(s_p/τ)) ) = −log σ((s_g − s_p)/τ)
        s_g = cos(z, z_g), s_p = cos(z, z_p)

    It is small where z is closer to the global model's representation than to the previous one's.

    Args:
        z: Representations by the model in training [B, D].
        z_global: Representations by the received model [B, D], computed without gradient.
        z_previous: Representations by the client's previous model [B, D], computed without gradient.
        tau: Temperature τ.
        similarity: "sample" averages ℓ over the batch, as in the papers; "batch" averages each cosine before the
            logarithm, as in the code of FedIntR's authors.

    Returns:
        The loss, a scalar.

    Raises:
        UserError: `similarity` is not one of these values.

    Example:
        >>> z, z_global, z_previous = torch.randn(3, 32, 16)
        >>> loss = model_contrastive(z, z_global, z_previous, tau=0.5)
    """
    if similarity not in ("sample", "batch"):
        raise UserError(f"similarity '{similarity}' is unknown: {nearest(similarity, ['sample', 'batch'])}")
    to_global, to_previous = cosines(z, z_global, z_previous)
    if similarity == "batch":
        to_global, to_previous = to_global.mean(), to_previous.mean()
    return -F.logsigmoid((to_global - to_previous) / tau).mean()
