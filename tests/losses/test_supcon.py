import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.core.errors import UserError
from fedloom.losses import supcon, supcon_sum
from fedloom.losses.supcon import anchor_losses

TAU = 0.1


def unit(n, d):
    return F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1)


def softmax_over_others(z, j, tau):
    others = [a for a in range(len(z)) if a != j]
    weights = {a: math.exp(float(z[j] @ z[a]) / tau) for a in others}
    total = sum(weights.values())
    return {a: w / total for a, w in weights.items()}


def reference(z, y, tau, positives):
    z, y = z.numpy(), y.numpy()
    losses = []
    for j in range(len(z)):
        p = softmax_over_others(z, j, tau)
        own = [p[a] for a in p if y[a] == y[j]]
        if not own:
            losses.append(0.0)
        elif positives == "in":
            losses.append(-math.log(sum(own) / len(own)))
        else:
            losses.append(-sum(math.log(q) for q in own) / len(own))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("positives", ["in", "out"])
def test_equals_a_numpy_loop_with_an_anchor_that_has_no_positive(positives):
    z, y = unit(9, 5), torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 0])
    assert supcon(z, y, TAU, positives).item() == pytest.approx(reference(z, y, TAU, positives), rel=1e-9)


def test_the_mean_over_positives_is_inside_the_logarithm_unless_asked():
    z, y = unit(8, 4), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    assert supcon(z, y, TAU).equal(supcon(z, y, TAU, "in"))
    assert supcon(z, y, TAU, "out") > supcon(z, y, TAU, "in")  # Jensen


def test_in_and_out_agree_where_every_anchor_has_one_positive():
    z, y = unit(8, 4), torch.arange(4).repeat(2)
    torch.testing.assert_close(supcon(z, y, TAU, "out"), supcon(z, y, TAU, "in"), rtol=1e-12, atol=0)


def test_out_is_fedstyle_equation_2_up_to_its_factor():
    size = 4
    z, styles = unit(2 * size, 5), torch.tensor([0] * size + [1] * size)
    total = 0.0
    for i in range(2 * size):
        p = softmax_over_others(z.numpy(), i, TAU)
        total += sum(-math.log(p[j]) for j in p if styles[j] == styles[i]) / (2 * size - 1)
    factor = 2 * size * (size - 1) / (2 * size - 1)
    assert supcon(z, styles, TAU, "out").item() * factor == pytest.approx(total, rel=1e-9)
    assert supcon_sum(z, styles, TAU).item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("j", [1, 4, 8])
def test_gradient_of_one_anchor_is_repper_equation_10(j):
    z, y = unit(10, 6).requires_grad_(), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 3])
    (gradient,) = torch.autograd.grad(anchor_losses(z, z.detach(), y, TAU, "in")[j], z)

    points, labels = z.detach().numpy(), y.numpy()
    p = softmax_over_others(points, j, TAU)
    of_positives = sum(p[a] for a in p if labels[a] == labels[j])
    share = {a: p[a] / of_positives if labels[a] == labels[j] else 0.0 for a in p}
    expected = sum(points[a] * (p[a] - share[a]) for a in p) / TAU
    np.testing.assert_allclose(gradient[j].numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("positives", ["in", "out"])
def test_gradients_check(positives):
    z, y = unit(7, 4).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2, 0])
    assert torch.autograd.gradcheck(lambda z: supcon(z, y, TAU, positives), z)


def test_anchors_without_a_positive_contribute_nothing():
    z, y = unit(5, 4).requires_grad_(), torch.arange(5)
    for positives in ("in", "out"):
        loss = supcon(z, y, TAU, positives)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.item() == 0
        assert gradient.abs().max().item() == 0


def test_refuses_an_unknown_kind_of_positives():
    with pytest.raises(UserError, match="did you mean 'out'"):
        supcon(unit(4, 2), torch.zeros(4, dtype=torch.long), TAU, "outt")
