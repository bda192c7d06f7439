import numpy as np
import pytest
import torch

from fedloom.losses import barlow_twins

LAMBDA = 0.005


def reference(z1, z2):
    n, d = z1.shape
    total = 0.0
    for i in range(d):
        for j in range(d):
            a, b = z1[:, i] - z1[:, i].mean(), z2[:, j] - z2[:, j].mean()
            spread = np.sqrt(((a**2).mean() + 1e-5) * ((b**2).mean() + 1e-5))
            correlation = sum(a[k] * b[k] for k in range(n)) / n / spread
            total += (1 - correlation) ** 2 if i == j else LAMBDA * correlation**2
    return total


def test_equals_a_numpy_loop():
    z1, z2 = torch.randn(2, 7, 4, dtype=torch.float64)
    assert barlow_twins(z1, z2, LAMBDA).item() == pytest.approx(reference(z1.numpy(), z2.numpy()), rel=1e-9)


def test_gradients_check():
    z1, z2 = torch.randn(2, 5, 3, dtype=torch.float64)
    inputs = (z1.requires_grad_(), z2.requires_grad_())
    assert torch.autograd.gradcheck(lambda z1, z2: barlow_twins(z1, z2, LAMBDA), inputs)


def test_equal_views_of_uncorrelated_features_have_no_loss():
    z = 100 * torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert barlow_twins(z, z, LAMBDA).item() == pytest.approx(0, abs=1e-12)


def test_collapsed_features_cost_one_each():
    z = torch.ones(6, 3, dtype=torch.float64)
    assert barlow_twins(z, z, LAMBDA).item() == pytest.approx(3, rel=1e-12)
