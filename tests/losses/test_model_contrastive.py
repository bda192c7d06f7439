import math

import numpy as np
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.losses import model_contrastive


def layers(n=6, d=5):
    return tuple(torch.randn(n, d, dtype=torch.float64) for _ in range(3))


def cosine(a, b):
    return float(a @ b) / (math.sqrt(a @ a) * math.sqrt(b @ b))


def contrast(to_global, to_previous, tau):
    positive, negative = math.exp(to_global / tau), math.exp(to_previous / tau)
    return -math.log(positive / (positive + negative))


def test_per_sample_it_is_the_mean_of_equation_2():
    z, received, previous = (t.numpy() for t in layers())
    expected = np.mean(
        [contrast(cosine(a, g), cosine(a, p), 0.5) for a, g, p in zip(z, received, previous, strict=True)]
    )
    tensors = map(torch.from_numpy, (z, received, previous))
    assert model_contrastive(*tensors, 0.5).item() == pytest.approx(expected, rel=1e-9)


def test_per_batch_it_is_equation_2_of_the_mean_cosines():
    z, received, previous = (t.numpy() for t in layers())
    to_global = np.mean([cosine(a, g) for a, g in zip(z, received, strict=True)])
    to_previous = np.mean([cosine(a, p) for a, p in zip(z, previous, strict=True)])
    value = model_contrastive(*map(torch.from_numpy, (z, received, previous)), 0.5, similarity="batch")
    assert value.item() == pytest.approx(contrast(to_global, to_previous, 0.5), rel=1e-9)


@pytest.mark.parametrize("similarity", ["sample", "batch"])
def test_gradients_check(similarity):
    z, received, previous = layers()
    assert torch.autograd.gradcheck(
        lambda z: model_contrastive(z, received, previous, 0.5, similarity), z.requires_grad_()
    )


@pytest.mark.parametrize("similarity", ["sample", "batch"])
def test_equal_references_give_log_two_and_no_gradient(similarity):
    z, received, _ = layers()
    z.requires_grad_()
    loss = model_contrastive(z, received, received.clone(), 0.5, similarity)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
    assert z.grad.abs().max().item() == pytest.approx(0, abs=1e-15)


def test_refuses_an_unknown_similarity():
    with pytest.raises(UserError, match="did you mean 'batch'"):
        model_contrastive(*layers(), 0.5, similarity="batches")
