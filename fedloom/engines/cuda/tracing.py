"""A training step as a function of tensors: traced once, for one client or for many at a time, compiled if asked for.

A step touches nothing but its workspace's memory (recording.py sees to that), so what it does to one workspace's
tensors can be traced and done to another's.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.core.batches import Row
from fedloom.core.torch_internals import compile_graph, decompositions, make_fx
from fedloom.core.workspace import Steps
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
