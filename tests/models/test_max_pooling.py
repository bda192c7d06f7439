"""Our max-pooling is torch's, bit for bit: values, and gradients of any order that a method takes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.models import MaxPool2d

WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": 1, "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2},
]


def awkward(*shape, dtype=torch.float32):
    """Images with many equal values, both zeros, infinities and NaN."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = x[0].round()
    x[1, :, ::2], x[1, :, 1::2] = 0.0, -0.0
    x[2, 0, 3, 4], x[2, 1] = float("nan"), float("-inf")
    return x


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_values_and_gradients_equal_torchs_to_the_bit(window, dtype):
    x = awkward(4, 8, 17, 13, dtype=dtype).requires_grad_()
    ours, theirs = MaxPool2d(**window)(x), nn.MaxPool2d(**window)(x)
    assert ours.is_contiguous()
    assert torch.equal(bits(ours), bits(theirs))
    gradient = torch.randn_like(theirs)
    (mine,), (other,) = (torch.autograd.grad(y, x, gradient) for y in (ours, theirs))
    assert torch.equal(bits(mine), bits(other))


def test_second_derivatives_and_vmap():
    x = awkward(4, 2, 6, 6).nan_to_num(0, 0, 0).requires_grad_()

    def second(pool):
        (first,) = torch.autograd.grad(pool(x * x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(second(MaxPool2d(2)), second(nn.MaxPool2d(2)))
    many = torch.randn(3, 2, 4, 6, 6)
    assert torch.equal(torch.func.vmap(MaxPool2d(2))(many), torch.func.vmap(nn.MaxPool2d(2))(many))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_traced_steps_contain_the_operation_that_lanes_know():
    x = torch.randn(2, 3, 4, 4)
    with Operations() as seen:
        MaxPool2d(2)(x)
    assert seen.names == ["aten::max_pool2d_with_indices"]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 8, 6, 6).bfloat16(),
        torch.randn(8, 6, 6),
    ],
    ids=["channels last", "bfloat16", "no batch"],
)
def test_other_inputs_are_torchs(x):
    ours, theirs = MaxPool2d(2)(x), nn.MaxPool2d(2)(x)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_it_compiles_as_one_graph():
    compiler = CompileCounter()
    torch.compile(MaxPool2d(2), backend=compiler, fullgraph=True)(torch.randn(2, 3, 4, 4))
    assert compiler.frame_count == 1


def test_exported_models_contain_one_operation():
    traced = torch.jit.trace(MaxPool2d(2), torch.randn(2, 3, 4, 4))
    operations = [node.kind() for node in traced.graph.nodes() if not node.kind().startswith("prim::")]
    assert operations == ["aten::max_pool2d"]
