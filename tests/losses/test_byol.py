import numpy as np
import pytest
import torch

from fedloom.losses import byol


def quadruple(n=5, d=4):
    return torch.randn(4, n, d, dtype=torch.float64).unbind()


def mean_squared_distance_of_directions(a, b):
    pairs = zip(a.numpy(), b.numpy(), strict=True)
    return np.mean([np.sum((u / np.linalg.norm(u) - v / np.linalg.norm(v)) ** 2) for u, v in pairs])


def test_equals_a_numpy_loop_over_distances_of_unit_vectors():
    p1, p2, z1, z2 = quadruple()
    expected = mean_squared_distance_of_directions(p1, z2) + mean_squared_distance_of_directions(p2, z1)
    assert byol(p1, p2, z1, z2).item() == pytest.approx(expected, rel=1e-9)


def test_gradients_check_for_the_predictions():
    p1, p2, z1, z2 = quadruple()
    inputs = (p1.requires_grad_(), p2.requires_grad_())
    assert torch.autograd.gradcheck(lambda p1, p2: byol(p1, p2, z1, z2), inputs)


def test_the_gradient_stops_at_the_target():
    p1, p2, z1, z2 = (t.requires_grad_() for t in quadruple())
    byol(p1, p2, z1, z2).backward()
    assert z1.grad is None
    assert z2.grad is None


def test_matching_directions_give_zero_and_opposite_ones_eight():
    p1, p2, _, _ = quadruple()
    assert byol(p1, p2, 2 * p2, 3 * p1).item() == pytest.approx(0, abs=1e-12)
    assert byol(p1, p2, -p2, -p1).item() == pytest.approx(8, rel=1e-12)
