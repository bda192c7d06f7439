"""A whole training step as one graph of tensor operations, compiled by torch's inductor, the same for every lane.

A step touches nothing but its lane's memory (recording.py sees to that), so what it does to one lane's tensors can be
traced once and done to another's. Random numbers are drawn before the compiled part, from the lane's own generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.core.batches import Indices
from fedloom.core.workspace import StepCache, Workspace
from fedloom.engines.recording import CaptureError, read_only, undone, written

Function = Callable[..., Any]
TRACING = RLock()
"""Held by whoever traces: make_fx patches torch.nn.Module for the whole process."""
UNMARKED = [torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward]
KNOWN: Any = get_decompositions(UNMARKED)
"""Operations that write where their schemas do not say so; torch knows what they are made of."""


@dataclass(frozen=True)
class Draw:
    """One drawing of random numbers: the operation without its generator."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    like: Tensor | None  # what an in-place drawing fills

    def __call__(self, generator: torch.Generator) -> Tensor:
        """Draws again."""
        kwargs = self.kwargs | {"generator": generator}
        if self.like is None:
            drawn: Tensor = self.func(*self.args, **kwargs)
        else:
            drawn = self.func(torch.empty_like(self.like), *self.args, **kwargs)
        return drawn


class Draws(TorchDispatchMode):
    """Notes every drawing; or, given what was drawn before, hands that out in the same order."""

    def __init__(self, given: list[Tensor] | None = None):
        TorchDispatchMode.__init__(self)
        self.noted: list[Draw] = []
        self._given = None if given is None else iter(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(kwargs.get("generator"), torch.Generator):
            return func(*args, **kwargs)
        in_place = func._schema.name.endswith("_")
        if self._given is not None:
            drawn = next(self._given)
            return args[0].copy_(drawn) if in_place else drawn
        rest = args[1:] if in_place else args
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(rest)):
            raise CaptureError(f"{func} draws with probabilities that are tensors: it cannot be compiled")
        plain = {name: value for name, value in kwargs.items() if name != "generator"}
        like = torch.empty_like(args[0]) if in_place else None
        self.noted.append(Draw(func, rest, plain, like))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Compiled:
    """A step as a function of a lane's tensors, and the drawings that come before it."""

    function: Function
    draws: list[Draw]

    def bind(self, lane: Workspace, site: StepCache) -> Callable[[Indices], None]:
        """The step on this lane's tensors."""
        inputs = [tensor.detach() for tensor in unique(lane, site)]

        def step(indices: Indices) -> None:
            with torch.no_grad():
                drawn = [draw(lane.generator) for draw in self.draws]
                self.function(*inputs, *indices, *drawn)

        return step


def compile_batched(function: Function, inputs: list[Tensor]) -> Function:
    """A function of blocks, compiled (tens of seconds); what it does to these inputs must be undone."""
    with TRACING, torch.no_grad():
        return compile_graph(make_fx(function, tracing_mode="real", decomposition_table=KNOWN)(*inputs), inputs)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Function:
    """By torch's inductor."""
    from torch._inductor.compile_fx import compile_fx

    with TRACING, torch.no_grad():
        function: Function = compile_fx(graph, inputs)  # type: ignore[assignment]
    return function


def compile_step(lane: Workspace, site: StepCache, step: Callable[[Indices], None], indices: Indices) -> Compiled:
    """Traces a step and compiles it (tens of seconds)."""
    graph, draws, inputs = trace(lane, site, step, indices)
    return Compiled(compile_graph(graph, inputs), draws)


def trace(
    lane: Workspace, site: StepCache, step: Callable[[Indices], None], indices: Indices
) -> tuple[torch.fx.GraphModule, list[Draw], list[Tensor]]:
    """What a step does to its lane's tensors, as a graph; the drawings before it; and the tensors it was traced on."""
    with undone(lane, site):
        with Draws() as draws:
            step(indices)
        drawn = [draw(lane.generator) for draw in draws.noted]

        def body(*_: Tensor) -> Tensor:  # the inputs are the lane's own tensors, which are known by what they are
            with Draws(given=drawn):
                step(indices)
            return site.lr + 0

        originals = [*unique(lane, site), *indices, *drawn]
        with TRACING:
            graph = make_fx(body, tracing_mode="real", decomposition_table=KNOWN)(*originals)
    return graph, draws.noted, [tensor.detach() for tensor in originals]


def unique(lane: Workspace, site: StepCache) -> list[Tensor]:
    """Everything that a step may touch, each tensor once."""
    return list({id(t): t for t in (*written(lane, site), *read_only(lane, site))}.values())
