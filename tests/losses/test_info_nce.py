import math

import numpy as np
import pytest
import torch

from fedloom.losses import info_nce

TAU = 0.1


def sample(n=7, classes=4, d=5):
    z = torch.randn(n, d, dtype=torch.float64)
    prototypes = 3 * torch.randn(classes, d, dtype=torch.float64)
    return z, prototypes, torch.arange(n) % classes


def reference(z, prototypes, y, known):
    """FedCRL Eq. 12 with the unknown classes left out."""
    z, prototypes = z.numpy(), prototypes.numpy()
    losses = []
    for j, c in enumerate(y.tolist()):
        if not known[c]:
            losses.append(0.0)
            continue
        scores = {}
        for other in range(len(prototypes)):
            if known[other]:
                cosine = z[j] @ prototypes[other] / np.linalg.norm(z[j]) / np.linalg.norm(prototypes[other])
                scores[other] = math.exp(cosine / TAU)
        losses.append(-math.log(scores[c] / sum(scores.values())))
    return sum(losses) / len(losses)


def test_equals_a_numpy_loop():
    z, prototypes, y = sample()
    assert info_nce(z, prototypes, y, TAU).item() == pytest.approx(reference(z, prototypes, y, [True] * 4), rel=1e-9)


def test_with_unknown_classes_equals_a_numpy_loop():
    z, prototypes, y = sample()
    known = torch.tensor([True, False, True, True])
    value = info_nce(z, prototypes, y, TAU, known)
    assert value.item() == pytest.approx(reference(z, prototypes, y, known.tolist()), rel=1e-9)


def test_an_unknown_class_is_never_read():
    z, prototypes, y = sample()
    known = torch.tensor([True, False, True, True])
    emptied = prototypes.index_fill(0, torch.tensor([1]), 0)
    assert info_nce(z, emptied, y, TAU, known).equal(info_nce(z, prototypes, y, TAU, known))


def test_with_all_classes_known_the_mask_changes_nothing():
    z, prototypes, y = sample()
    masked = info_nce(z, prototypes, y, TAU, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(masked, info_nce(z, prototypes, y, TAU), rtol=1e-12, atol=0)


def test_with_no_class_known_it_is_zero_without_gradient():
    z, prototypes, y = sample()
    loss = info_nce(z.requires_grad_(), torch.zeros_like(prototypes), y, TAU, torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert z.grad.abs().max().item() == 0


def test_length_of_either_side_does_not_matter():
    z, prototypes, y = sample()
    torch.testing.assert_close(info_nce(7 * z, prototypes / 3, y, TAU), info_nce(z, prototypes, y, TAU))


@pytest.mark.parametrize("known", [None, torch.tensor([True, False, True, True])])
def test_gradients_check(known):
    z, prototypes, y = sample()
    inputs = (z.requires_grad_(), prototypes.requires_grad_())
    assert torch.autograd.gradcheck(lambda z, prototypes: info_nce(z, prototypes, y, TAU, known), inputs)
