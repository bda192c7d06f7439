"""Vectorisation of a traced step over many clients, whose tensors are stored as rows of larger tensors (blocks)."""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.core.torch_internals import has_batching_rule, rebatched, resolve_overload, unbatched, vmap_level
from fedloom.engines.recorded.pooling import pooled, pooled_backward
from fedloom.engines.recorded.products import Products

ELEMENTWISE = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "exp", "abs", "copy", "pow",
               "sign"}  # fmt: skip

BATCH_NORMS = {"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"}
"""Operations whose fourth and fifth arguments are running statistics."""


def batched(graph: fx.GraphModule, shared: Sequence[bool], fused: bool = False) -> Callable[..., Any]:
    """Return the traced step as a function of blocks of tensors.

    Args:
        graph: The traced step of one client.
        shared: For each input, whether all clients share it; then it has no rows.
        fused: Whether the result will be compiled.
    """
    changing = _changing(graph)

    def step(*inputs: Tensor) -> Any:
        return _Batchable(graph, changing, fused).run(*inputs)

    return torch.func.vmap(step, in_dims=tuple(None if common else 0 for common in shared))


class _Batchable(fx.Interpreter):
    """Executes a step's operations in forms that are fast for many clients."""

    def __init__(self, graph: fx.GraphModule, changing: set[fx.Node], fused: bool):
        super().__init__(graph)
        self._changing, self._fused = changing, fused
        self._products = Products(fused)

    def run_node(self, n: fx.Node) -> Any:
        """Execute one node. The current node is stored: `_may_change` looks up its inputs."""
        self._node = n
        return super().run_node(n)

    def _may_change(self, argument: int) -> bool:
        """Return whether this argument of the current node is written in place anywhere in the graph."""
        node = self._node.args[argument]
        return isinstance(node, fx.Node) and _base(node) in self._changing

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Execute one operation of the graph."""
        name = getattr(getattr(target, "_schema", None), "name", "")
        if name.startswith("aten::_foreach_"):
            done = _at_once(target, args, kwargs)
            return self._one_by_one(name.removeprefix("aten::_foreach_"), args, kwargs) if done is None else done
        if target is torch.ops.aten.view.default and not self._may_change(0):  # results of Products are channels-last
            return args[0].reshape(args[1])
        if name == "aten::convolution":
            x, weight, bias, stride, padding, dilation, transposed, _, groups = args
            if Products.can(x, dilation, transposed, groups):
                return self._of(0).forward(x, weight, bias, stride, padding)
        if name == "aten::convolution_backward":
            gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args
            if Products.can(x, dilation, transposed, groups):
                return self._of(1).backward(gradient, x, weight, stride, padding, wanted)
        if name == "aten::max_pool2d_with_indices" and not self._fused:
            values_and_places = pooled(self._node, *args)
            if values_and_places is not None:
                return values_and_places
        if name == "aten::max_pool2d_with_indices_backward" and args[7].dtype == torch.int8:
            return pooled_backward(*args)
        if name in BATCH_NORMS:
            return self._batch_norm(target, list(args), kwargs)
        return self._do(target, args, kwargs)

    def _batch_norm(self, target: Any, args: list[Any], kwargs: Any) -> Any:
        """Update copies of the running statistics and copy them back: vmap would update a copy of strided rows."""
        apart = args[3:5]
        if apart[0] is None:
            return self._do(target, args, kwargs)
        args[3:5] = [statistic.clone() for statistic in apart]
        made = self._do(target, args, kwargs)
        for statistic, moved in zip(apart, args[3:5], strict=True):
            statistic.copy_(moved)
        return made

    def _of(self, images: int) -> Products:
        """Return the cached patches of this argument, unless it may have changed since."""
        return Products(self._fused) if self._may_change(images) else self._products

    def _one_by_one(self, name: str, args: Any, kwargs: Any) -> list[Any]:
        """Execute a foreach operation, which vmap does not support, tensor by tensor."""
        if name.rstrip("_") in ("addcmul", "addcdiv") and len(args) == 4:
            args, kwargs = args[:3], {"value": args[3]}
        operation = getattr(torch.ops.aten, name)
        results = []
        for i in range(len(args[0])):
            each = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
            overload = getattr(operation, resolve_overload(name, each, kwargs))
            results.append(self._do(overload, each, kwargs))
        return results

    def _do(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Execute one operation; in-place operations without a batching rule are done out of place and copied."""
        name = getattr(getattr(target, "_schema", None), "name", "")
        if kwargs.get("memory_format") == torch.channels_last:  # the layout of Products differs
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        if not _in_place(target) or has_batching_rule(target):
            return super().call_function(target, tuple(args), kwargs)
        functional = getattr(getattr(torch.ops.aten, name.removeprefix("aten::").rstrip("_")), target._overloadname)
        return args[0].copy_(functional(*args, **kwargs))


def _changing(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that are written in place."""
    found = set()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found |= {_base(one) for one in (value if isinstance(value, (list, tuple)) else [value])}
    return found


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view or the result of an in-place operation refers to."""
    while node.target is getitem or getattr(node.target, "is_view", False) or _in_place(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _in_place(target: Any) -> bool:
    """Return whether an operation writes to its first argument and returns it."""
    handed_on = [made.alias_info for made in target._schema.returns] if hasattr(target, "_schema") else []
    return bool(handed_on) and handed_on[0] is not None and handed_on[0].is_write


def _at_once(target: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Execute an elementwise foreach operation directly on the blocks of all clients.

    Returns None for other operations, and if a tensor outside the lists (a learning rate) has a row per client.
    """
    if target._schema.name.removeprefix("aten::_foreach_").rstrip("_") not in ELEMENTWISE:
        return None
    tensors = [[x.shape for x in a] for a in args if isinstance(a, (list, tuple)) and isinstance(a[0], Tensor)]
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) or any(s != tensors[0] for s in tensors):
        return None
    lists = [[_rows(x) for x in a] if isinstance(a, (list, tuple)) else a for a in args]
    if any(x is None for a in lists if isinstance(a, list) for x in a):
        return None
    made = target(*lists, **kwargs)
    return [] if made is None else [rebatched(tensor, vmap_level(args[0][0])) for tensor in made]


def _rows(value: Any) -> Any:
    return unbatched(value) if isinstance(value, Tensor) else value
