"""Convolutions as matrix products equal torch's, forward and backward."""

import pytest
import torch
from torch.nn.functional import conv2d

from fedloom.engines.products import Products


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_convolution_and_its_gradients(stride, padding, kernel):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 9, 8, dtype=torch.double, requires_grad=True)
    weight = torch.randn(5, 4, kernel, kernel, dtype=torch.double, requires_grad=True)
    bias = torch.randn(5, dtype=torch.double, requires_grad=True)
    expected = conv2d(x, weight, bias, stride, padding)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        products, sizes = Products(), ([stride] * 2, [padding] * 2)
        torch.testing.assert_close(products.forward(x, weight, bias, *sizes), expected)
        got = products.backward(gradient, x, weight, *sizes, [True] * 3)
    for mine, tensor in zip(got, (x, weight, bias), strict=True):
        torch.testing.assert_close(mine, tensor.grad)


def test_what_is_not_wanted_is_not_computed():
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    gradient = torch.randn(2, 4, 3, 3)
    assert Products().backward(gradient, x, weight, [1, 1], [0, 0], [False] * 3) == (None, None, None)
