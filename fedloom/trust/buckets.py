"""Bucketing: a robust rule combines means of a few random clients, which differ less than single clients.

Reference: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from secrets import randbits

import numpy as np
import torch
from torch import Tensor

from fedloom.core.message import Message
from fedloom.core.rng import numpy_generator
from fedloom.core.state import under

Orders = Callable[[int], np.random.Generator]
"""Returns the source of the random order of a round's clients."""


def seeded_orders(seed: int) -> Orders:
    """Return orders derived from a seed, for simulations."""
    return lambda round: numpy_generator(seed, round, "buckets")


def system_orders(round: int) -> np.random.Generator:
    """Return the operating system's randomness, for deployments: members know the seed, and must not know buckets."""
    return np.random.default_rng(randbits(128))


def bucketed(
    messages: Sequence[Message],
    size: int,
    generator: np.random.Generator,
    rows: Mapping[str, str],
    sums: tuple[str, ...],
) -> Iterator[Message]:
    """Yield the mean message of each of ⌈n / size⌉ random buckets; the last one may be smaller.

    A row with weights is averaged over the clients of the bucket that hold it, and its weight is their number. Addends
    are scaled, so that their sum over buckets is n times the mean of the buckets' means. Integers take the maximum.

    Args:
        messages: The messages of n clients; row weights are 0 or 1.
        size: Number of clients per bucket.
        generator: Draws the order of the clients.
        rows: By tensor with row weights: the name of the tensor that holds its weights.
        sums: Paths of the tensors that are added up.
    """
    order = generator.permutation(len(messages))
    count = -(-len(messages) // size)
    for start in range(0, len(messages), size):
        bucket = [messages[i] for i in order[start : start + size]]
        yield Message({name: _mean(name, bucket, rows, sums, len(messages) / count) for name in bucket[0]})


def _mean(name: str, bucket: Sequence[Message], rows: Mapping[str, str], sums: tuple[str, ...], scale: float) -> Tensor:
    values = torch.stack([message[name] for message in bucket])
    if name in rows.values():
        return values.sum(0)
    if not values.is_floating_point():
        return values.amax(0)
    if name in rows:
        weights = torch.stack([message[rows[name]] for message in bucket]).double()
        weights = weights.reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))
        mean = (weights * values).sum(0) / weights.sum(0).clamp_min(1)
    else:
        mean = values.double().mean(0)
    return (mean * scale if under(name, sums) else mean).to(values.dtype)
