"""What is asked of every loss: finite at extremes, and a step that a CUDA graph can hold."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fedloom import losses

TAU = 0.01


def labels(z):
    return torch.arange(len(z), device=z.device) % 3


def one_class(z):
    return torch.zeros(len(z), dtype=torch.long, device=z.device)


def one_each(z):
    return torch.arange(len(z), device=z.device)


def supcon(z, other, positives, y):
    return losses.supcon(F.normalize(z, dim=1), y(z), TAU, positives)


def info_nce(z, other, known):
    classes = torch.arange(3, device=z.device)
    mask = {"all": None, "some": classes != 1, "none": classes < 0}[known]
    # Prototypes out of the batch: rows repeat where it is small.
    return losses.info_nce(z, other[classes % len(other)], labels(z), TAU, mask)


LOSSES = {
    **{
        f"supcon {positives}, {y.__name__}": partial(supcon, positives=positives, y=y)
        for positives in ("in", "out")
        for y in (labels, one_class, one_each)
    },
    **{
        f"supcon_sum, {y.__name__}": lambda z, other, y=y: losses.supcon_sum(F.normalize(z, dim=1), y(z), TAU)
        for y in (labels, one_class, one_each)
    },
    **{f"info_nce, {known} known": partial(info_nce, known=known) for known in ("all", "some", "none")},
    **{
        f"model_contrastive {s}": lambda z, other, s=s: losses.model_contrastive(z, other, -other, TAU, s)
        for s in ("sample", "batch")
    },
    **{
        f"layerwise_contrastive {s} {w}": lambda z, other, s=s, w=w: losses.layerwise_contrastive(
            [z, z.square()], [other, other], [-other, other], TAU, s, w
        )
        for s in ("sample", "batch")
        for w in ("softmax", "average")
    },
    "nt_xent": lambda z, other: losses.nt_xent(z, other, TAU),
    "negative_cosine": lambda z, other: losses.negative_cosine(z, z.square(), other, other.abs()),
    "byol": lambda z, other: losses.byol(z, z.square(), other, other.abs()),
    "barlow_twins": lambda z, other: losses.barlow_twins(z, other, 0.005),
    "moco": lambda z, other: losses.moco(z, other, F.normalize(other, dim=1), TAU),
    "linear_cka": losses.linear_cka,
}

INPUTS = {
    "512 by 256": lambda: (torch.randn(512, 256), torch.randn(512, 256)),
    "one sample": lambda: (torch.randn(1, 8), torch.randn(1, 8)),
    "two samples": lambda: (torch.randn(2, 8), torch.randn(2, 8)),
    "identical rows": lambda: (torch.randn(1, 8).repeat(6, 1), torch.randn(1, 8).repeat(6, 1)),
    "identical rows, all the same": lambda: (torch.ones(6, 8), torch.ones(6, 8)),
    "opposite": lambda: (torch.ones(6, 8), -torch.ones(6, 8)),
    "zeros": lambda: (torch.zeros(6, 8), torch.zeros(6, 8)),
    "large": lambda: (1e4 * torch.randn(6, 8), 1e4 * torch.randn(6, 8)),
    "small": lambda: (1e-6 * torch.randn(6, 8), 1e-6 * torch.randn(6, 8)),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_finite(loss, inputs):
    z, other = INPUTS[inputs]()
    value = LOSSES[loss](z.requires_grad_(), other)
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_no_shape_and_no_branch_depends_on_values(loss):
    # Fake tensors have no values: reading one, or a shape made of one, raises.
    with FakeTensorMode():
        z = torch.randn(6, 8, requires_grad=True)
        LOSSES[loss](z, torch.randn(6, 8)).backward()
        assert z.grad.shape == (6, 8)


def test_pushing_into_the_queue_reads_no_value_either():
    with FakeTensorMode():
        losses.enqueue(torch.zeros(5, 3), torch.zeros((), dtype=torch.long), torch.randn(2, 3))


@pytest.mark.cuda
@pytest.mark.parametrize("loss", LOSSES)
def test_a_captured_step_gives_what_an_eager_one_gives(loss):
    z = torch.randn(6, 8, device="cuda", requires_grad=True)
    other = torch.randn(6, 8, device="cuda")

    def step():
        value = LOSSES[loss](z, other)
        return value.detach(), *torch.autograd.grad(value, z)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        z.normal_()
        other.normal_()
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.cuda
def test_a_captured_push_moves_the_pointer_at_every_replay():
    queue = torch.zeros(5, 2, device="cuda")
    pointer = torch.tensor(0, device="cuda")
    keys = torch.ones(3, 2, device="cuda")
    losses.enqueue(queue, pointer, keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses.enqueue(queue, pointer, keys)
    queue.zero_(), pointer.zero_()
    for start in (0, 3, 6):
        keys.copy_(torch.tensor([[1.0, start + i] for i in range(3)]))
        graph.replay()
    assert pointer.item() == 9 % 5
    latest = F.normalize(torch.tensor([[1.0, i] for i in range(4, 9)]), dim=1)
    torch.testing.assert_close(queue.roll(-int(pointer), 0).cpu(), latest)
