"""Max-pooling of many clients at once equals torch's, places of equal values included."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import max_pool2d

from fedloom.engines.recorded.batching import batched

SHAPES = [(2, 2, 0), (3, 2, 1), (3, 1, 0), ((2, 3), (1, 2), (1, 0))]


def step(kernel, stride, padding):
    """Pools, and writes what comes out and its gradient into its arguments."""

    def body(x, out, gradient):
        leaf = x.detach().requires_grad_()
        made = max_pool2d(leaf, kernel, stride, padding)
        out.copy_(made)
        gradient.copy_(torch.autograd.grad((made**2).sum(), leaf)[0])
        return x + 0

    return body


def compared(x, kernel, stride, padding):
    """Of three clients: alone and at once."""
    out = torch.stack([max_pool2d(own, kernel, stride, padding) for own in x])
    alone, at_once = ([torch.zeros_like(out), torch.zeros_like(x)] for _ in range(2))
    body = step(kernel, stride, padding)
    for i in range(len(x)):
        body(x[i], *(t[i] for t in alone))
    graph = make_fx(body)(x[0], *(t[0] for t in at_once))
    with torch.no_grad():
        batched(graph, [False] * 3)(x, *at_once)
    for mine, theirs in zip(at_once, alone, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(kernel, stride, padding, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 9, 8).to(device, dtype)
    compared(x, kernel, stride, padding)
    compared(x.to(memory_format=torch.channels_last_3d), kernel, stride, padding)
    compared(x.relu(), kernel, stride, padding)  # many equal values


@pytest.mark.cuda
def test_what_is_not_finite():
    x = torch.randn(3, 2, 2, 4, 4, device="cuda")
    x[0, 0, 0, 0, 1], x[1, 0, 0, 1, 1], x[2, 1, 1] = float("nan"), float("inf"), float("-inf")
    compared(x, 2, 2, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_places_that_something_else_reads_are_torchs(device):
    def body(x, out):
        out.copy_(max_pool2d(x, 2, return_indices=True)[1])
        return x + 0

    x = torch.randn(3, 1, 2, 4, 4, device=device)
    out = torch.zeros(3, 1, 2, 2, 2, dtype=torch.long, device=device)
    graph = make_fx(body)(x[0], out[0])
    batched(graph, [False] * 2)(x, out)
    torch.testing.assert_close(out[1], max_pool2d(x[1], 2, return_indices=True)[1])
