"""Prototypes: what a class looks like to a network."""

import torch
from torch import Tensor

CLASS_STATISTICS = {
    "counts": "how many training samples of each class the client has, exactly",
    "means": "the mean representation of each class; of a class with one sample, that sample's representation",
    "moments": "the means again, times the share of each class",
}
"""What class means and their counts say about a client's data, by the names that methods send them under."""


@torch.no_grad()
def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean representation and number of samples of every class ([C, k] and [C]; zeros for absent classes)."""
    member = torch.nn.functional.one_hot(y, classes).to(z.dtype)
    counts = member.sum(0)
    return member.T @ z / counts.clamp_min(1)[:, None], counts
