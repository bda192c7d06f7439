"""Loss and queue of MoCo (He et al., CVPR 2020, https://arxiv.org/abs/1911.05722, Eq. 1 and Alg. 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def moco(q: Tensor, k: Tensor, queue: Tensor, tau: float) -> Tensor:
    """Compute the contrast of each query with its own key and the keys of earlier batches.

        ℓ_i = −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ),   mean over the batch

    Args:
        q: Queries by the network in training [B, D]; normalised here.
        k: Keys of the same images by the momentum network [B, D]; normalised here. No gradient flows into them.
        queue: Keys of earlier batches [K, D], normalised, as `enqueue` stores them.
        tau: Temperature τ.

    Returns:
        The mean over the batch, a scalar.

    Example:
        >>> q, k = torch.randn(2, 32, 16)
        >>> queue = torch.nn.functional.normalize(torch.randn(1024, 16), dim=1)
        >>> loss = moco(q, k, queue, tau=0.07)
    """
    q = F.normalize(q, dim=1)
    own = (q * F.normalize(k.detach(), dim=1)).sum(1, keepdim=True)
    logits = torch.cat([own, q @ queue.detach().T], dim=1) / tau
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


@torch.no_grad()
def enqueue(queue: Tensor, pointer: Tensor, keys: Tensor) -> None:
    """Replace the oldest keys of the queue by new ones and advance the pointer, both in place.

    Args:
        queue: Normalised keys [K, D].
        pointer: Position of the oldest key, a 0-d int64 tensor. It is a tensor so that a CUDA graph can advance it.
        keys: New keys [B, D]; normalised here. If there are more than K, the last K are stored.

    Example:
        >>> queue, pointer = torch.zeros(4, 2), torch.tensor(3)
        >>> enqueue(queue, pointer, torch.ones(2, 2))
        >>> pointer.item()
        1
    """
    keys = F.normalize(keys[-len(queue) :], dim=1)
    slots = (pointer + torch.arange(len(keys), device=queue.device)) % len(queue)
    queue.index_copy_(0, slots, keys.to(queue.dtype))
    pointer.add_(len(keys)).remainder_(len(queue))
