"""Model-contrastive loss: MOON Eq. 3 (Li et al., 2021, https://arxiv.org/abs/2103.16257), FedIntR Eq. 2."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.losses.precision import in_float32


def cosines(z: Tensor, *others: Tensor) -> list[Tensor]:
    """cos(z, other) along the last dimension, for each of the others; as F.cosine_similarity, but z is scaled once."""
    z = F.normalize(z, dim=-1, eps=1e-8)
    return [(z * F.normalize(other, dim=-1, eps=1e-8)).sum(-1) for other in others]


@in_float32
def model_contrastive(
    z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float, similarity: Literal["sample", "batch"] = "sample"
) -> Tensor:
    """Draws a representation to the global model's and away from the previous local model's.

        ℓ = −log( exp(s_g/τ) / (exp(s_g/τ) + exp(s_p/τ)) ) = −log σ((s_g − s_p)/τ)
        s_g = cos(z, z_g), s_p = cos(z, z_p)

    "sample" takes ℓ of each sample and then the mean, as the papers write it; "batch" takes the mean of each
    cosine first, as FedIntR's authors' code does.

    Args:
        z: representations by the model in training [B, D].
        z_global: by the received model [B, D]; without gradient.
        z_previous: by the client's previous model [B, D]; without gradient.
        tau: temperature.
        similarity: where the mean over the batch is taken.
    """
    if similarity not in ("sample", "batch"):
        raise UserError(f"similarity '{similarity}' is unknown: {nearest(similarity, ['sample', 'batch'])}")
    to_global, to_previous = cosines(z, z_global, z_previous)
    if similarity == "batch":
        to_global, to_previous = to_global.mean(), to_previous.mean()
    return -F.logsigmoid((to_global - to_previous) / tau).mean()
