"""Training steps as functions of tensors: traced once, applied to one or many clients, optionally compiled.

A step touches only its workspace's memory, which checks.py checks. So operations traced in one workspace can be
applied to the tensors of another.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom.core.batches import Row
from fedloom.core.torch_internals import compile_graph, decompositions, make_fx
from fedloom.core.workspace import Steps
from fedloom.engines.recorded.checks import touched, undone

Function = Callable[..., Any]
"""A step: updates its arguments, the tensors that `touched` lists, given the row as its last argument."""


def trace(steps: Steps, row: Row) -> fx.GraphModule:
    """Return a step as a graph of operations on the tensors that it touches."""

    def body(*_: Tensor) -> Tensor:  # the arguments are the workspace's tensors, which tracing recognises by identity
        steps.step(row)
        return steps.cache.lr + 0

    with undone(steps), _simple_operations(steps.workspace.device):
        steps.step(row)
        return make_fx(body, tracing_mode="real", decomposition_table=decompositions())(*touched(steps), row)


@contextmanager
def _simple_operations(device: torch.device) -> Iterator[None]:
    """On a CPU, compute recurrent layers and attention by operations that vmap supports.

    Of the fused ones, attention would run client by client, and an LSTM not at all: without gradients, which a traced
    step does not record, it does not return what its backward pass needs.
    """
    if device.type != "cpu":
        yield
        return
    fused = torch.backends.mkldnn.enabled
    # the context manager `flags` also sets other flags, which warn
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.enabled = fused


def compiled(function: Function, inputs: Sequence[Tensor]) -> Function:
    """Compile a step with torch's inductor; return the original, with a warning, if that fails.

    The step is executed once, so the caller must undo its changes to the inputs.
    """
    inputs = [tensor.detach() for tensor in inputs]
    try:
        with torch.no_grad():
            graph = function
            if not isinstance(function, fx.GraphModule):
                graph = make_fx(function, tracing_mode="real", decomposition_table=decompositions())(*inputs)
            fast = compile_graph(graph, inputs)
            fast(*inputs)  # the first call autotunes kernels
        return fast
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, none of which should end a run
        warnings.warn(f"engine.compile: a training step runs uncompiled: {error}", stacklevel=2)
        return function
