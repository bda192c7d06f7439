"""Class means (prototypes): the mean representation of each class."""

import torch
from torch import Tensor

CLASS_STATISTICS = {
    "counts": "how many training samples of each class the client has, exactly",
    "means": "the mean representation of each class; of a class with one sample, that sample's representation",
    "moments": "the mean representation of each class, times the class's share of the samples",
}
"""Information about a client's data in the class statistics that methods send, by part name."""
ABSENT = 1e-8
"""Count of a class without samples in losses that take its logarithm or a negative power of it."""


@torch.no_grad()
def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean representation and the number of samples of each class.

    Args:
        z: Representations [N, D].
        y: Labels [N].
        classes: Number of classes C.

    Returns:
        Means [C, D] and counts [C]; both are zero for classes without samples.

    Example:
        >>> means, counts = class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), classes=2)
        >>> means.flatten().tolist(), counts.tolist()
        ([2.0, 0.0], [2.0, 0.0])
    """
    member = torch.nn.functional.one_hot(y, classes).to(z.dtype)
    counts = member.sum(0)
    return member.T @ z / counts.clamp_min(1)[:, None], counts
