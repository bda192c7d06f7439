"""Lanes on a CPU, with a recorder that does as CUDA graphs do: work is recorded once and replayed in the same memory."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.core.workspace import Setup, Workspace
from fedloom.engines.cuda.cohort import Cohort
from fedloom.engines.cuda.lane import Lane, Shared
from fedloom.engines.recording import storage


class Recording(TorchDispatchMode):
    """The tensor operations of some work; `replay` does them again."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = {storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [(i, t) for i, t in enumerate(made) if storage(t) not in read]
        self.operations.append((func, args, kwargs or {}, fresh, made))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, fresh, _ in self.operations:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for i, tensor in fresh:
                tensor.detach().copy_(again[i])


class Recorder:
    """Records on a CPU; counts recordings and replays."""

    def __init__(self, error=None):
        self.recorded = self.replays = 0
        self.error = error

    def capture(self, work):
        if self.error is not None:
            raise self.error
        with Recording() as recording:
            work()
        self.recorded += 1

        def replay():
            self.replays += 1
            recording.replay()

        return replay

    def settle(self):
        pass


def lane_of(setup: Setup, slots: int = 1, recorder: Recorder | None = None, **shared) -> Lane:
    """A lane of one client at a time, or a cohort of several."""

    def new_workspace(**options):
        return Workspace(setup, **options)

    parts = (new_workspace, recorder or Recorder(), Shared(**shared))
    return Lane(*parts) if slots == 1 else Cohort(slots, *parts)
