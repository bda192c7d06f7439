"""State of training steps besides the parts: optimizers, statistics, features; and its memory layout for cohorts."""

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.optimizers import NOT_KEPT, TORCH_OPTIMIZERS, Optimizer, OptimizerSettings
from fedloom.core.protocols import Network
from fedloom.core.state import State
from fedloom.core.torch_optimizer import TorchOptimizer

Allocate = Callable[[Hashable, tuple[int, ...], torch.dtype], Tensor]
"""Returns zeros of a shape and dtype, identified by a name."""
STATISTICS = 33
"""Maximum number of statistics per call site, one of which is `FINITE_STEPS`."""
FINITE_STEPS = "steps before the loss was not finite"
"""Statistic that every fit has besides those that the method notes."""


class StepCache:
    """Statistics, learning rate and optimizer state of one call site of `fit` or `steps`."""

    def __init__(
        self,
        site: Hashable,
        parts: tuple[str, ...],
        networks: list[Network],
        optimized: Mapping[tuple[str, ...], list[Tensor]],
        settings: OptimizerSettings,
        allocate: Allocate,
        names: dict[str, int],
    ):
        self.site = site
        self.parts = parts
        """Parts that the steps train."""
        self.networks = networks
        """Networks that overlap with these parts."""
        self.names = names
        """Position of each statistic in `sums`."""
        self._allocate = allocate
        self.sums = allocate((site, "sums"), (STATISTICS,), torch.float32)
        self.lr = allocate((site, "lr"), (), torch.float32)
        self.optimizers: dict[tuple[str, ...], Optimizer | TorchOptimizer] = {
            paths: TorchOptimizer(parameters, settings)
            if settings.name in TORCH_OPTIMIZERS
            else Optimizer(parameters, settings, lambda name, *form, paths=paths: allocate((site, paths, name), *form))
            for paths, parameters in optimized.items()
        }
        self.data: tuple[Tensor, Tensor] | None = None
        """Features and labels to train on, if they replace the images."""
        self.version = 0
        """Incremented when `data` is reallocated, which invalidates recorded steps that read the old memory."""
        self._rate: float | None = None

    def flat(self) -> list[Tensor]:
        """Return all tensors that are zeroed before the first step."""
        return [self.sums, *(t for optimizer in self.optimizers.values() for t in optimizer.state())]

    def tensors(self) -> list[Tensor]:
        """Return all tensors of this cache that a step reads or writes."""
        views = (t for optimizer in self.optimizers.values() for t in optimizer.tensors())
        return [self.lr, self.sums, *views, *(self.data or ())]

    def total(self, name: str) -> Tensor:
        """Return the running sum of a statistic, a 0-d tensor that steps add to.

        Raises:
            UserError: There are too many statistics.
        """
        if name not in self.names and len(self.names) == STATISTICS:
            raise UserError(f"client.note('{name}', …): a fit can have at most {STATISTICS - 1} statistics")
        return self.sums[self.names.setdefault(name, len(self.names))]

    def reset(self) -> None:
        """Zero statistics and optimizer state."""
        self.sums.zero_()
        for optimizer in self.optimizers.values():
            optimizer.reset()

    def set_lr(self, value: float) -> None:
        """Set the learning rate."""
        if self._rate != value:
            self.lr.fill_(value)
            self._rate = value

    def means(self, samples: int) -> State:
        """Return the mean of each statistic over the samples."""
        means = self.sums[: len(self.names)] / samples
        return dict(zip(self.names, means.unbind(), strict=True))

    def optimizer_state(self, name: str) -> State:
        """Return the state of all optimizers, by the names used in a client's memory.

        Raises:
            UserError: The state of an optimizer of torch.optim is wanted.
        """
        if any(isinstance(optimizer, TorchOptimizer) for optimizer in self.optimizers.values()):
            raise UserError(f"training.optimizer: {name}() keeps the optimizer, but {NOT_KEPT}")
        return {
            f"optim.{name}.{'+'.join(paths)}.{i}": tensor
            for paths, optimizer in self.optimizers.items()
            for i, tensor in enumerate(optimizer.state())
        }

    def hold(self, data: tuple[Tensor, Tensor], capacity: int | None) -> None:
        """Set the features to train on. With a capacity, copy them to fixed memory, which recorded steps require."""
        if capacity is None:
            self.data = data
            return
        if self.data is None or len(self.data[0]) < len(data[0]):
            self._make_room(data, max(capacity, len(data[0])))
        assert self.data is not None
        for buffer, values in zip(self.data, data, strict=True):
            buffer[: len(values)].copy_(values)

    def hold_like(self, other: "StepCache") -> None:
        """Allocate memory for features of the same shape as in another workspace's cache of this call site."""
        if other.data is not None and (self.data is None or self.data[0].shape != other.data[0].shape):
            self._make_room(other.data, len(other.data[0]))

    def _make_room(self, like: tuple[Tensor, Tensor], capacity: int) -> None:
        self.version += 1
        z, y = (
            self._allocate((self.site, "data", i, capacity), (capacity, *t.shape[1:]), t.dtype)
            for i, t in enumerate(like)
        )
        self.data = z, y


class Rows:
    """Memory of a cohort's workspaces: every allocation is a row of a block that is shared by all workspaces."""

    def __init__(self, count: int):
        self.count = count
        self._blocks: dict[Hashable, Tensor] = {}
        self._length: dict[int, int] = {}

    def zeros(
        self, name: Hashable, row: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return one row of the block with this name; the block is allocated on first use."""
        if name not in self._blocks:
            block = self._blocks[name] = torch.zeros(self.count, *shape, dtype=dtype, device=device)
            self._length[block.untyped_storage().data_ptr()] = block.stride(0)
        return self._blocks[name][row]

    def block(self, tensor: Tensor, row: int, count: int) -> Tensor | None:
        """Return the first `count` rows for a tensor of the workspace `row`; None if all workspaces share it."""
        length = self._length.get(tensor.untyped_storage().data_ptr())
        if length is None:
            return None
        start = tensor.storage_offset() - row * length
        return tensor.detach().as_strided((count, *tensor.shape), (length, *tensor.stride()), start)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return each tensor once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())
