"""A traced step as a function of many clients' tensors gives what it gives for each of them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import conv2d

from fedloom.engines.recorded.batching import batched


def applied(function, *blocks):
    """A function of one client's tensors, batched, and what it is client by client."""
    graph = make_fx(function)(*(block[0] for block in blocks))
    expected = torch.stack([function(*rows) for rows in zip(*(block.clone() for block in blocks), strict=True)])
    return batched(graph, [False] * len(blocks))(*blocks), expected


def test_an_image_that_changes_between_two_convolutions():
    def twice(x, weight):
        x = x + 1
        first = conv2d(x, weight)
        x.mul_(2)
        return first + conv2d(x, weight)

    torch.testing.assert_close(*applied(twice, torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, 3, 3)))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1].add_(1),
        lambda x: x.copy_(2 * x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.data.add_(1),
        lambda x: x.add_(1),
    ],
)
def test_an_image_that_changes_between_two_gradients(change, kernel):
    def twice(x, weight):
        x, weight = x + 0, weight.detach().requires_grad_()
        (first,) = torch.autograd.grad(conv2d(x, weight).square().sum(), weight)
        with torch.no_grad():
            change(x)
        y = conv2d(x, weight)
        (second,) = torch.autograd.grad(y.square().sum(), weight)
        return torch.cat([first.flatten(), second.flatten(), y.detach().flatten()])

    blocks = torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, kernel, kernel)
    torch.testing.assert_close(*applied(twice, *blocks), rtol=1e-4, atol=1e-4)


def test_a_view_that_is_written_is_a_view_or_refused():
    def doubled(x, weight):
        y = conv2d(x, weight)
        y.view(len(y), -1).mul_(2)
        return y

    with pytest.raises(RuntimeError, match="view size is not compatible"):
        applied(doubled, torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, 3, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.stack(torch._foreach_norm([a, b])),
        lambda a, b: torch._foreach_mul([a, b], [a.sum(), b.sum()])[0],
        lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.3)[1],
        lambda a, b: torch._foreach_addcmul([a, b], [b, a], [a, a], 0.5)[0],
    ],
)
def test_operations_on_lists(function):
    torch.testing.assert_close(*applied(function, torch.randn(4, 4), torch.randn(4, 4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, lr: torch._foreach_add_([a, b], 0.5),
        lambda a, b, lr: torch._foreach_add_([a, b], [b, a], alpha=0.5),
        lambda a, b, lr: torch._foreach_sub_([a, b], torch._foreach_mul([b, a], lr)),  # a rate of each client's own
        lambda a, b, lr: torch._foreach_lerp_([a, b], [b, a + 1], 0.3),
        lambda a, b, lr: torch._foreach_addcmul_([a, b], [b, b], [a, a], 0.1),
        lambda a, b, lr: torch._foreach_div_([a, b], lr + 2),
        lambda a, b, lr: torch._foreach_copy_([a], [b * lr]),
        lambda a, b, lr: a.lerp_(b, lr),
        lambda a, b, lr: a.add_(b.sum(), alpha=2.0),
        lambda a, b, lr: a[1:].copy_(b[:-1]),
    ],
)
def test_what_is_written_in_place_is_each_clients_own(change):
    def step(a, b, lr):
        change(a, b, lr)
        return a + 0

    made = torch.Generator().manual_seed(0)
    blocks = [torch.rand(5, 4, 3, generator=made), torch.rand(5, 4, 3, generator=made), torch.rand(5, generator=made)]
    expected = [block.clone() for block in blocks]
    graph = make_fx(step)(*(block[0].clone() for block in blocks))
    got = batched(graph, [False] * 3)(*blocks)
    for rows in zip(*expected, strict=True):
        change(*rows)
    for mine, theirs in zip(blocks, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(got, expected[0])


def test_what_all_share_has_no_rows():
    graph = make_fx(lambda x, table: x + table[2])(torch.zeros(3), torch.ones(4, 3))
    x, table = torch.randn(5, 3), torch.randn(4, 3)
    torch.testing.assert_close(batched(graph, [False, True])(x, table), x + table[2])
