"""Convolutions as matrix products equal torch's, forward and backward."""

import pytest
import torch
from torch.nn.functional import conv2d

from fedloom.engines.recorded.products import Products

FUSED = pytest.mark.parametrize("fused", [False, True])
"""The form for a compiler, and the one without."""


def compared(x, weight, stride, padding, fused):
    """With torch's own, in double precision: what comes out, and the gradients of image, weight and bias."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.randn(len(weight), dtype=torch.double, requires_grad=True)
    expected = conv2d(x, weight, bias, stride, padding)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        products, sizes = Products(fused), ([stride] * 2, [padding] * 2)
        torch.testing.assert_close(products.forward(x, weight, bias, *sizes), expected)
        got = products.backward(gradient, x, weight, *sizes, [True] * 3)
    for mine, tensor in zip(got, (x, weight, bias), strict=True):
        torch.testing.assert_close(mine, tensor.grad)


@FUSED
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_convolution_and_its_gradients(stride, padding, kernel, fused):
    torch.manual_seed(0)
    compared(torch.randn(3, 4, 9, 8), torch.randn(5, 4, kernel, kernel), stride, padding, fused)


@FUSED
@pytest.mark.parametrize(
    ("side", "kernel", "stride", "padding"),
    [(1, 5, 1, 2), (2, 5, 2, 2), (1, 7, 1, 3), (2, 7, 1, 3), (2, 7, 2, 3), (1, 4, 2, 2), (1, 1, 7, 3), (9, 3, 4, 0)],
)
def test_kernels_that_reach_beyond_small_images_or_leave_some_out(side, kernel, stride, padding, fused):
    compared(torch.randn(2, 3, side, side), torch.randn(4, 3, kernel, kernel), stride, padding, fused)


def test_what_is_not_wanted_is_not_computed():
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    gradient = torch.randn(2, 4, 3, 3)
    assert Products().backward(gradient, x, weight, [1, 1], [0, 0], [False] * 3) == (None, None, None)


@FUSED
def test_uneven_kernels_strides_and_paddings(fused):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 7, dtype=torch.double, requires_grad=True)
    weight = torch.randn(4, 3, 3, 2, dtype=torch.double, requires_grad=True)
    expected = conv2d(x, weight, None, (2, 3), (1, 2))
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        products = Products(fused)
        torch.testing.assert_close(products.forward(x, weight, None, (2, 3), (1, 2)), expected)
        to_input, to_weight, _ = products.backward(gradient, x, weight, (2, 3), (1, 2), [True, True, False])
    torch.testing.assert_close(to_input, x.grad)
    torch.testing.assert_close(to_weight, weight.grad)


@FUSED
def test_halves_are_added_up_in_full_precision(fused):
    gradient = torch.ones(1, 1, 20, 20, dtype=torch.bfloat16)
    weight = torch.full((1, 1, 17, 17), 1 / 256, dtype=torch.bfloat16)
    x = torch.zeros(1, 1, 36, 36, dtype=torch.bfloat16)
    to_input, _, _ = Products(fused).backward(gradient, x, weight, (1, 1), (0, 0), [True, False, False])
    assert to_input[0, 0, 18, 18] == torch.tensor(17 * 17 / 256, dtype=torch.bfloat16)  # in halves it stops at 1


@FUSED
def test_whichever_dimension_the_clients_are_in(fused):
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(2, 4, 3, 7, 6), torch.randn(4, 5, 3, 3, 3), torch.randn(2, 5, 4, 7, 6)

    def both(x, weight, gradient):
        sizes = (1, 1), (1, 1)
        to_input, to_weight, _ = Products(fused).backward(gradient, x, weight, *sizes, [True, True, False])
        return Products(fused).forward(x, weight, None, *sizes), to_input, to_weight

    got = torch.func.vmap(both, in_dims=(1, 0, 2))(x, weight, gradient)
    for client in range(4):
        images, kernel = x[:, client].clone().requires_grad_(), weight[client].clone().requires_grad_()
        expected = conv2d(images, kernel, padding=1)
        expected.backward(gradient[:, :, client])
        for mine, theirs in zip(got, (expected, images.grad, kernel.grad), strict=True):
            torch.testing.assert_close(mine[client], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (5, 1, 2), (5, 2, 0), (2, 3, 1), (1, 1, 0)])
def test_a_gpus_gradient_of_images_is_a_cpus(kernel, stride, padding, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 3, 11, 9), torch.randn(4, 3, kernel, kernel)
    gradient = torch.randn_like(conv2d(x, weight, None, stride, padding))
    sizes, wanted = ([stride] * 2, [padding] * 2), [True, False, False]
    expected, _, _ = Products().backward(gradient.double(), x.double(), weight.double(), *sizes, wanted)
    device = [t.to("cuda", dtype) for t in (gradient, x, weight)]
    got, _, _ = Products().backward(*device, *sizes, wanted)
    assert got.dtype == dtype
    close = {"rtol": 0.02, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}  # TF32 or not
    torch.testing.assert_close(got.cpu().double(), expected, **close)

    def one(gradient, x, weight):
        return Products().backward(gradient, x, weight, *sizes, wanted)[0]

    many = torch.func.vmap(one)(*(torch.stack([t, 2 * t]) for t in device))
    torch.testing.assert_close(many[0], got, **close)
    torch.testing.assert_close(many[1], 4 * got, **{name: 4 * value for name, value in close.items()})


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (5, 1, 0), (5, 2, 2), (2, 3, 1), (1, 1, 0)])
def test_a_gpus_convolutions_of_many_clients_are_a_cpus(kernel, stride, padding, layout, dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 3, 11, 9), torch.randn(4, 5, 3, kernel, kernel), torch.randn(4, 5)
    gradient = torch.randn(4, *conv2d(x[0], weight[0], None, stride, padding).shape)
    sizes = [stride] * 2, [padding] * 2

    def both(x, weight, bias, gradient):
        products = Products()
        return products.forward(x, weight, bias, *sizes), *products.backward(gradient, x, weight, *sizes, [True] * 3)

    expected = torch.func.vmap(both)(*(t.double() for t in (x, weight, bias, gradient)))
    x, gradient = (t.flatten(0, 1).to(memory_format=layout).unflatten(0, (4, -1)) for t in (x, gradient))
    got = torch.func.vmap(both)(*(t.to("cuda", dtype) for t in (x, weight, bias, gradient)))
    close = {"rtol": 0.03, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-2}  # TF32 or not
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, **close)
