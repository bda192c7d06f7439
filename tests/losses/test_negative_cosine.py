import numpy as np
import pytest
import torch

from fedloom.losses import negative_cosine


def quadruple(n=5, d=4):
    return torch.randn(4, n, d, dtype=torch.float64).unbind()


def mean_cosine(a, b):
    pairs = zip(a.numpy(), b.numpy(), strict=True)
    return np.mean([u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v in pairs])


def test_equals_a_numpy_loop_across_the_views():
    p1, p2, z1, z2 = quadruple()
    expected = -mean_cosine(p1, z2) / 2 - mean_cosine(p2, z1) / 2
    assert negative_cosine(p1, p2, z1, z2).item() == pytest.approx(expected, rel=1e-9)


def test_gradients_check_for_the_predictions():
    p1, p2, z1, z2 = quadruple()
    inputs = (p1.requires_grad_(), p2.requires_grad_())
    assert torch.autograd.gradcheck(lambda p1, p2: negative_cosine(p1, p2, z1, z2), inputs)


def test_the_gradient_stops_at_the_projections():
    p1, p2, z1, z2 = (t.requires_grad_() for t in quadruple())
    negative_cosine(p1, p2, z1, z2).backward()
    assert z1.grad is None
    assert z2.grad is None


def test_matching_directions_give_minus_one():
    p1, p2, _, _ = quadruple()
    assert negative_cosine(p1, p2, 2 * p2, 3 * p1).item() == pytest.approx(-1, rel=1e-12)
