"""MoCo's loss and its queue (He et al., 2020, https://arxiv.org/abs/1911.05722, Eq. 1 and Alg. 1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.losses.precision import in_float32


@in_float32
def moco(q: Tensor, k: Tensor, queue: Tensor, tau: float) -> Tensor:
    """A query should match its own key among the keys of earlier batches.

        ℓ_i = −log( exp(q_i·k_i/τ) / (exp(q_i·k_i/τ) + Σ_j exp(q_i·queue_j/τ)) ),   mean over the batch

    Args:
        q: queries by the network in training [B, D]; brought to unit length here.
        k: keys of the same images by the momentum network [B, D]; likewise; the gradient is stopped here.
        queue: earlier keys [K, D], of unit length as `enqueue` leaves them.
        tau: temperature.
    """
    q = F.normalize(q, dim=1)
    own = (q * F.normalize(k.detach(), dim=1)).sum(1, keepdim=True)
    logits = torch.cat([own, q @ queue.detach().T], dim=1) / tau
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


@torch.no_grad()
def enqueue(queue: Tensor, pointer: Tensor, keys: Tensor) -> None:
    """Writes keys over the oldest ones of the queue and moves the pointer on, both in place.

    Args:
        queue: keys of unit length [K, D].
        pointer: where the oldest key is, a 0-d long: a tensor, so that a captured step can move it.
        keys: new keys [B, D], any length; of more than K, the last K are kept.
    """
    keys = F.normalize(keys[-len(queue) :], dim=1)
    slots = (pointer + torch.arange(len(keys), device=queue.device)) % len(queue)
    queue.index_copy_(0, slots, keys.to(queue.dtype))
    pointer.add_(len(keys)).remainder_(len(queue))
