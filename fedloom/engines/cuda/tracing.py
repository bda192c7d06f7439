"""A training step as a function of tensors: traced once, for one client or for many at a time, compiled if asked for.

A step touches nothing but its workspace's memory (recording.py sees to that), so what it does to one workspace's
tensors can be traced and done to another's.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.core.batches import Row
from fedloom.core.stepping import Steps
from fedloom.core.torch_internals import compile_graph, decompositions, make_fx
from fedloom.engines.recording import touched, undone

Function = Callable[..., Any]
"""A step: changes its arguments, the tensors that `touched` lists, by the row, its last argument."""


def trace(steps: Steps, row: Row) -> fx.GraphModule:
    """What a step does to the tensors that it touches, as a graph of operations on them."""

    def body(*_: Tensor) -> Tensor:  # the arguments are the workspace's own tensors: known by what they are
        steps.step(row)
        return steps.cache.lr + 0

    with undone(steps):
        steps.step(row)
        return make_fx(body, tracing_mode="real", decomposition_table=decompositions())(*touched(steps), row)


def compiled(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The same by torch's inductor; what it does to these inputs must be undone. If that fails, a warning says why."""
    inputs = [tensor.detach() for tensor in inputs]
    try:
        with torch.no_grad():
            graph = function
            if not isinstance(function, fx.GraphModule):
                graph = make_fx(function, tracing_mode="real", decomposition_table=decompositions())(*inputs)
            fast = compile_graph(graph, inputs)
            fast(*inputs)  # the first call tunes kernels
        return fast
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it fails in many ways, none of which should end a run
        warnings.warn(f"engine.compile: a training step runs uncompiled: {error}", stacklevel=2)
        return function


def compiled_rows(function: Function, inputs: Sequence[Tensor]) -> Function:
    """The same for a function of many clients' tensors, which are columns of one matrix with a row for each client.

    They are given to the compiler as matrices: of those it knows that they do not overlap, of others it does not.
    """
    forms = [(tensor.shape, tensor.stride()) for tensor in inputs]

    def of_matrices(*matrices: Tensor) -> Any:
        return function(*(_from_matrix(m, *form) for m, form in zip(matrices, forms, strict=True)))

    fast = compiled(of_matrices, [_as_matrix(tensor) for tensor in inputs])
    return lambda *tensors: fast(*map(_as_matrix, tensors))


def _in_columns(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's rows are dense and have others' between them."""
    return len(shape) > 2 and stride[0] > math.prod(shape[1:]) and shape[0] > 1


def _as_matrix(tensor: Tensor) -> Tensor:
    if not _in_columns(tensor.shape, tensor.stride()):
        return tensor
    return tensor.as_strided((len(tensor), tensor[0].numel()), (tensor.stride(0), 1))


def _from_matrix(matrix: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    if not _in_columns(shape, stride):
        return matrix
    order = sorted(range(1, len(shape)), key=lambda dim: -stride[dim])
    return matrix.view(len(matrix), *(shape[dim] for dim in order)).permute(
        0, *(1 + order.index(dim) for dim in range(1, len(shape)))
    )
