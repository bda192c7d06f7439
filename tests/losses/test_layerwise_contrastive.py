import math

import numpy as np
import pytest
import torch

from fedloom.core.errors import UserError
from fedloom.losses import layerwise_contrastive, model_contrastive

TAU = 0.5
WIDTHS = (3, 7, 4)
SAMPLES = 5


def three_models(widths=WIDTHS):
    return [[torch.randn(SAMPLES, d, dtype=torch.float64) for d in widths] for _ in range(3)]


def cosines(zs, others):
    """[K][B]"""
    return np.array(
        [
            [float(a @ b) / float(np.sqrt(a @ a) * np.sqrt(b @ b)) for a, b in zip(z.numpy(), o.numpy(), strict=True)]
            for z, o in zip(zs, others, strict=True)
        ]
    )


def regulariser(to_global, to_previous, weights):
    """Eq. 5 or 6 of one sample (or of the batch's mean cosines)."""
    positive, negative = np.exp(to_global / TAU), np.exp(to_previous / TAU)
    losses = -np.log(positive / (positive + negative))
    alpha = positive / positive.sum() if weights == "softmax" else np.full(len(losses), 1 / len(losses))
    return float(sum(a * loss for a, loss in zip(alpha, losses, strict=True)))


@pytest.mark.parametrize("widths", [WIDTHS, (4, 4, 4)])
@pytest.mark.parametrize("weights", ["softmax", "average"])
def test_per_sample_it_equals_a_numpy_loop(weights, widths):
    zs, received, previous = three_models(widths)
    to_global, to_previous = cosines(zs, received), cosines(zs, previous)
    expected = np.mean([regulariser(to_global[:, b], to_previous[:, b], weights) for b in range(SAMPLES)])
    value = layerwise_contrastive(zs, received, previous, TAU, weights=weights)
    assert value.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("widths", [WIDTHS, (4, 4, 4)])
@pytest.mark.parametrize("weights", ["softmax", "average"])
def test_per_batch_it_equals_a_numpy_loop(weights, widths):
    zs, received, previous = three_models(widths)
    expected = regulariser(cosines(zs, received).mean(1), cosines(zs, previous).mean(1), weights)
    value = layerwise_contrastive(zs, received, previous, TAU, similarity="batch", weights=weights)
    assert value.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("similarity", ["sample", "batch"])
@pytest.mark.parametrize("weights", ["softmax", "average"])
def test_one_layer_is_the_model_contrastive_loss(similarity, weights):
    (z, *_), (received, *_), (previous, *_) = three_models()
    value = layerwise_contrastive([z], [received], [previous], TAU, similarity, weights)
    torch.testing.assert_close(value, model_contrastive(z, received, previous, TAU, similarity))


@pytest.mark.parametrize("similarity", ["sample", "batch"])
@pytest.mark.parametrize("weights", ["softmax", "average"])
def test_gradients_check_through_the_weights_too(similarity, weights):
    zs, received, previous = three_models()
    assert torch.autograd.gradcheck(
        lambda *zs: layerwise_contrastive(zs, received, previous, TAU, similarity, weights),
        [z.requires_grad_() for z in zs],
    )


@pytest.mark.parametrize("similarity", ["sample", "batch"])
def test_equal_references_give_log_two_and_no_gradient(similarity):
    zs, received, _ = three_models()
    for z in zs:
        z.requires_grad_()
    loss = layerwise_contrastive(zs, received, received, TAU, similarity)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
    assert max(z.grad.abs().max().item() for z in zs) == pytest.approx(0, abs=1e-14)


def test_refuses_unknown_options():
    zs, received, previous = three_models()
    with pytest.raises(UserError, match="did you mean 'sample'"):
        layerwise_contrastive(zs, received, previous, TAU, similarity="samples")
    with pytest.raises(UserError, match="did you mean 'average'"):
        layerwise_contrastive(zs, received, previous, TAU, weights="averaged")
