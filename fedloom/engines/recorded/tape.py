"""Recording of tensor operations on a CPU, in place of CUDA graphs, for `replay` and for vectorised clients."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.core.torch_internals import DispatchMode
from fedloom.engines.recorded.checks import NoPythonReads, Watch, storage
from fedloom.engines.recorded.recorder import UNROLL, Work


class Tape(DispatchMode):
    """Records tensor operations with their memory; `replay` executes them again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operations such as transpose_ change the shape of a tensor object: keep what it was.
        given, named = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # changes a tensor's shape, which later operations have recorded
            return out
        read = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [(i, t.detach()) for i, t in enumerate(outputs) if storage(t) not in read]
        self._operations.append((func, given, named, fresh, torch.is_grad_enabled()))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Execute the recorded operations on the current contents of the memory."""
        with torch.autocast("cpu", enabled=False):  # a method's autocast around a fit is already part of the operations
            for func, args, kwargs, fresh, with_grad in self._operations:
                # Recurrent layers return what their backward needs only if gradients are enabled.
                with torch.set_grad_enabled(with_grad):
                    again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for i, tensor in fresh:
                    tensor.copy_(again[i])


class Tapes:
    """Records work on a CPU, as `Graphs` does on a GPU.

    Args:
        unroll: Numbers of steps to record together. More than one saves nothing on a CPU, and takes more memory: a tape
            holds the results of all its operations.
        records_single: Whether a cohort records the steps of single clients, too. This saves nothing on a CPU, either.
    """

    def __init__(self, unroll: tuple[int, ...] = UNROLL, *, records_single: bool = True):
        self.unroll, self.records_single = unroll, records_single

    def capture(self, work: Work) -> Work:
        """Record the work and return its replay.

        Raises:
            CaptureError: The work contains something that cannot be captured.
        """
        with NoPythonReads(), Watch(), Tape() as tape:
            work()
        replay: Work = tape.replay
        return replay

    def settle(self) -> None:
        """Do nothing: on a CPU all work is done when it returns."""
