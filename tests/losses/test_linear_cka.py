import numpy as np
import pytest
import torch

from fedloom.losses import linear_cka


def hsic(a, b):
    """tr(K H L H), the definition by centred kernels."""
    n = len(a)
    centring = np.eye(n) - 1 / n
    return np.trace(a @ a.T @ centring @ b @ b.T @ centring)


@pytest.mark.parametrize("widths", [(3, 2), (30, 40), (2, 90)], ids=["narrow", "wide", "mixed"])
def test_equals_the_definition_by_centred_kernels(widths):
    a, b = (torch.randn(8, width, dtype=torch.float64) + 1 for width in widths)
    first, second = a.numpy(), b.numpy()
    expected = hsic(first, second) / np.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(a, b).item() == pytest.approx(expected, rel=1e-9)


def test_rotation_scale_and_shift_leave_it_at_one():
    a = torch.randn(9, 4, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    assert linear_cka(a, 5 * a @ rotation - 2).item() == pytest.approx(1, rel=1e-12)


def test_uncorrelated_features_give_zero():
    a = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    b = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    assert linear_cka(a, b).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("widths", [(3, 2), (9, 8)])
def test_gradients_check(widths):
    a, b = (torch.randn(5, width, dtype=torch.float64, requires_grad=True) for width in widths)
    assert torch.autograd.gradcheck(linear_cka, (a, b))


def test_constant_activations_give_zero():
    a = torch.ones(5, 3, dtype=torch.float64)
    assert linear_cka(a, torch.randn(5, 2, dtype=torch.float64)).item() == 0
