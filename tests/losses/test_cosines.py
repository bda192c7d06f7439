"""Cosines with several others: torch's own, with their gradients."""

import pytest
import torch
import torch.nn.functional as F

from fedloom.losses.model_contrastive import cosines


@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0])
def test_values_and_gradients_are_those_of_torch(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z, a, b = (torch.randn(3, 8, 16, dtype=torch.float64, generator=generator) for _ in range(3))
    z = (z * scale).requires_grad_()
    ours, theirs = cosines(z, a, b), [F.cosine_similarity(z, other, dim=-1) for other in (a, b)]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
    found = [torch.autograd.grad(first.sum() - 2 * second.sum(), z)[0] for first, second in (ours, theirs)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14 * float(found[1].abs().max()))
