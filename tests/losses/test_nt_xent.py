import math

import numpy as np
import pytest
import torch

from fedloom.losses import nt_xent


def reference(z1, z2, tau):
    size = len(z1)
    z = [v / np.linalg.norm(v) for v in np.concatenate([z1, z2])]
    total = 0.0
    for i in range(2 * size):
        other_view = i + size if i < size else i - size
        scores = {k: math.exp(z[i] @ z[k] / tau) for k in range(2 * size) if k != i}
        total -= math.log(scores[other_view] / sum(scores.values()))
    return total / (2 * size)


def test_equals_a_numpy_loop():
    z1, z2 = torch.randn(2, 6, 5, dtype=torch.float64)
    assert nt_xent(z1, z2, 0.07).item() == pytest.approx(reference(z1.numpy(), z2.numpy(), 0.07), rel=1e-9)


def test_gradients_check():
    z1, z2 = torch.randn(2, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z1, z2: nt_xent(z1, z2, 0.2), (z1.requires_grad_(), z2.requires_grad_()))


def test_a_batch_of_one_has_no_negatives_and_no_loss():
    z1, z2 = torch.randn(2, 1, 5, dtype=torch.float64)
    assert nt_xent(z1, z2, 0.07).item() == 0


def test_identical_rows_give_the_logarithm_of_the_choices():
    z = torch.ones(4, 3, dtype=torch.float64)
    assert nt_xent(z, z, 0.07).item() == pytest.approx(math.log(7), rel=1e-12)
