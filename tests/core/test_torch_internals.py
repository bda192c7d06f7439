"""Functions that torch does not promise to keep are there, and do what fedloom uses them for."""

import importlib
import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.core import torch_internals as internals

aten = torch.ops.aten


def lists(seed=0):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 2, generator=made), torch.randn(5, generator=made)]


def test_operations_on_lists_do_to_all_what_they_do_to_each():
    targets, sources = lists(0), lists(1)
    internals.foreach_copy_(targets, sources)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    assert all(torch.equal(a, 3 * b) for a, b in zip(internals.foreach_mul(sources, 3.0), sources, strict=True))
    moved = lists(2)
    internals.foreach_lerp_(moved, sources, 0.25)
    for a, b, c in zip(moved, lists(2), sources, strict=True):
        assert torch.equal(a, torch.lerp(b, c, 0.25))
    for a, b, c in zip(internals.foreach_lerp(lists(2), sources, 0.25), lists(2), sources, strict=True):
        assert torch.equal(a, torch.lerp(b, c, 0.25))
    for a, b in zip(internals.foreach_sign(sources), sources, strict=True):
        assert torch.equal(a, torch.where(b > 0, 1.0, -1.0))
    for norm, a in zip(internals.foreach_norm(sources, torch.inf), sources, strict=True):
        assert norm == a.abs().max()


def test_a_function_is_traced_into_operations():
    x = torch.ones(3)
    graph = internals.make_fx(lambda x: x.mul_(2) + 1, tracing_mode="real", decomposition_table={})(x.clone())
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [aten.mul_.Tensor, aten.add.Tensor]
    assert torch.equal(graph(x), torch.full((3,), 3.0))


def test_batch_norms_of_cudnn_are_decomposed():
    found = internals.decompositions()
    assert aten.cudnn_batch_norm.default in found
    assert aten.cudnn_batch_norm_backward.default in found


@pytest.mark.slow
def test_a_compiled_graph_changes_its_inputs_even_views_of_one_buffer():
    buffer = torch.arange(128.0)
    inputs = [buffer[:64], buffer[64:]]

    def step(a, b):
        a.add_(b.sin(), alpha=2.0)
        return a.sum()

    graph = internals.make_fx(step, tracing_mode="real")(*(t.clone() for t in inputs))
    expected = buffer[:64] + 2 * buffer[64:].sin()
    with torch.no_grad():
        internals.compile_graph(graph, inputs)(*inputs)
    torch.testing.assert_close(buffer[:64], expected)
    assert torch.equal(buffer[64:], torch.arange(64.0, 128.0))


@pytest.mark.cuda
def test_leaving_a_pool_that_was_entered():
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)  # outside a capture, as torch.cuda.use_mem_pool does
    internals.end_allocate_to_pool(0, pool)
    with pytest.raises(RuntimeError):
        internals.end_allocate_to_pool(0, pool)


def test_a_dispatch_mode_is_excluded_from_compilation_once_the_compiler_is_there(monkeypatch):
    class Operations(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    own = Operations.__torch_dispatch__
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch._dynamo", raising=False)
        with Operations():
            assert Operations.__torch_dispatch__ is own
    importlib.import_module("torch._dynamo")
    for _ in range(2):
        with Operations():
            assert (torch.ones(1) + 1).item() == 2
    assert Operations.__torch_dispatch__.__wrapped__ is own


def test_open_modes_are_noticed():
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert not internals.contexts_open()
    for mode in (Calls(), Operations(), torch.device("meta")):
        with mode:
            assert internals.contexts_open()
        assert not internals.contexts_open()


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "overload"),
    [
        ("add", [torch.ones(2), torch.ones(2)], {}, "Tensor"),
        ("add_", [torch.ones(2), 1.0], {"alpha": 2}, "Tensor"),
        ("lerp_", [torch.ones(2), torch.ones(2), 0.5], {}, "Scalar"),
        ("lerp_", [torch.ones(2), torch.ones(2), torch.ones(())], {}, "Tensor"),
        ("addcmul", [torch.ones(2)] * 3, {"value": 2.0}, "default"),
    ],
)
def test_the_overload_for_arguments_is_found(name, args, kwargs, overload):
    found = internals.resolve_overload(name, args, kwargs)
    assert (found or "default") == overload
    getattr(getattr(aten, name), found or "default")(*[a.clone() if hasattr(a, "clone") else a for a in args], **kwargs)


def test_tensors_inside_transformations_are_noticed():
    seen = []
    for inside in (torch.func.vmap, torch.func.grad):
        inside(lambda x: seen.append(internals.transformed(x)) or x.sum())(torch.ones(2))
    assert seen == [True, True]
    assert not internals.transformed(torch.ones(2))


def test_what_vmap_knows_is_told_from_what_it_does_not():
    assert internals.has_batching_rule(aten.add.Tensor)
    assert internals.has_batching_rule(aten.mm.default)
    assert not internals.has_batching_rule(aten._foreach_add_.Scalar)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_come_out_of_vmap_and_go_back(dim):
    seen = []

    def work(x, shared):
        rows = internals.unbatched(x)
        seen.append((rows.clone(), internals.unbatched(shared), internals.vmap_level(x)))
        return internals.rebatched(2 * rows, internals.vmap_level(x)) + shared

    x, shared = torch.arange(6.0).reshape(2, 3), torch.ones(3 if dim == 0 else 2)
    got = torch.func.vmap(work, in_dims=(dim, None))(x, shared)
    rows = x.movedim(dim, 0)
    assert torch.equal(got, 2 * rows + shared)
    ((inside, common, level),) = seen
    assert torch.equal(inside, rows)
    assert common is None
    assert level >= 1


def test_levels_of_nested_vmaps_differ():
    levels = []

    def inner(x):
        levels.append(internals.vmap_level(x))
        return x

    torch.func.vmap(lambda x: levels.append(internals.vmap_level(x)) or torch.func.vmap(inner)(x))(torch.zeros(2, 3))
    assert levels[1] == levels[0] + 1


def test_every_function_is_tested_here():
    import inspect
    from pathlib import Path

    own = [n for n, f in vars(internals).items() if inspect.isfunction(f) and f.__module__ == internals.__name__]
    text = Path(__file__).read_text()
    assert own
    assert [name for name in own if f"internals.{name}(" not in text] == []


def test_a_private_base_of_batch_norms_is_there():
    assert isinstance(nn.BatchNorm2d(3), nn.modules.batchnorm._BatchNorm)
    assert not isinstance(nn.GroupNorm(1, 3), nn.modules.batchnorm._BatchNorm)
