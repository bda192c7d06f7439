"""The steps of one call of `fit` or `steps`: what they write besides the parts, and how they are executed."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedloom.core.batches import Plan, Row
from fedloom.core.errors import UserError
from fedloom.core.optimizers import Optimizer, OptimizerSettings
from fedloom.core.state import State

if TYPE_CHECKING:
    from fedloom.core.workspace import Workspace

Allocate = Callable[[Hashable, tuple[int, ...], torch.dtype], Tensor]
"""Zeros of a shape and dtype, under a name of their own."""
STATISTICS = 32
"""Names that the steps of one call can note."""


def _allocated(
    allocate: Allocate, owner: tuple[Hashable, ...], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return allocate((*owner, name), shape, dtype)


class StepCache:
    """Statistics, learning rate and optimizer state of one call site of `fit` or `steps`."""

    def __init__(
        self,
        site: Hashable,
        parts: tuple[str, ...],
        optimized: Mapping[tuple[str, ...], list[Tensor]],
        settings: OptimizerSettings,
        allocate: Allocate,
        names: dict[str, int],
    ):
        self.site = site
        self.parts = parts
        """Parts that the steps train."""
        self.names = names
        """Position of every statistic in `sums`."""
        self._allocate = allocate
        self.sums = allocate((site, "sums"), (STATISTICS,), torch.float32)
        self.lr = allocate((site, "lr"), (), torch.float32)
        self.optimizers = {
            paths: Optimizer(parameters, settings, partial(_allocated, allocate, (site, paths)))
            for paths, parameters in optimized.items()
        }
        self.data: tuple[Tensor, Tensor] | None = None
        """Features and labels that the steps train on, where they are not images."""
        self.version = 0
        """Changes when `data` moves to other memory: recordings that read the old memory are void."""
        self._rate: float | None = None

    def flat(self) -> list[Tensor]:
        """All memory that is zeroed before the first step."""
        return [self.sums, *(t for optimizer in self.optimizers.values() for t in optimizer.state())]

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes here."""
        views = (t for optimizer in self.optimizers.values() for t in optimizer.tensors())
        return [self.lr, self.sums, *views, *(self.data or ())]

    def total(self, name: str) -> Tensor:
        """The sum of a statistic, a 0-d tensor that steps add to."""
        if name not in self.names and len(self.names) == STATISTICS:
            raise UserError(f"client.note('{name}', …): a fit has at most {STATISTICS} statistics")
        return self.sums[self.names.setdefault(name, len(self.names))]

    def reset(self) -> None:
        """As if nothing had been trained here yet."""
        for tensor in self.flat():
            tensor.zero_()

    def set_lr(self, value: float) -> None:
        """The learning rate from now on."""
        if self._rate != value:
            self.lr.fill_(value)
            self._rate = value

    def means(self, samples: int) -> State:
        """Means over samples of what was noted."""
        means = self.sums / samples
        return {name: means[i] for name, i in self.names.items()}

    def optimizer_state(self, name: str) -> State:
        """All optimizers' state, by the names it has in a client's memory."""
        return {
            f"optim.{name}.{'+'.join(paths)}.{i}": tensor
            for paths, optimizer in self.optimizers.items()
            for i, tensor in enumerate(optimizer.state())
        }

    def hold(self, data: tuple[Tensor, Tensor], capacity: int | None) -> None:
        """Sets the features to train on; with a capacity, in memory of a fixed place, for steps that are recorded."""
        if capacity is None:
            self.data = data
            return
        if self.data is None or len(self.data[0]) < len(data[0]):
            self._make_room(data, max(capacity, len(data[0])))
        assert self.data is not None
        for buffer, values in zip(self.data, data, strict=True):
            buffer[: len(values)].copy_(values)

    def hold_like(self, other: "StepCache") -> None:
        """Has memory for features as another workspace's cache of this call has."""
        if other.data is not None and (self.data is None or self.data[0].shape != other.data[0].shape):
            self._make_room(other.data, len(other.data[0]))

    def _make_room(self, like: tuple[Tensor, Tensor], capacity: int) -> None:
        self.version += 1
        z, y = (
            self._allocate((self.site, "data", i, capacity), (capacity, *t.shape[1:]), t.dtype)
            for i, t in enumerate(like)
        )
        self.data = z, y


@dataclass(frozen=True)
class Steps:
    """Steps to be taken: a client's part of one call of `fit` or `steps`."""

    workspace: "Workspace"
    cache: StepCache
    step: Callable[[Row], None]
    plan: Plan
    lr: float
    kept: State = field(default_factory=dict)
    """Optimizer state from the client's last round, by the names of `cache.optimizer_state`."""
    keep_as: str | None = None

    def set_mode(self) -> None:
        """Puts what is trained into train mode, everything else into eval mode."""
        self.workspace.train_only(self.cache.parts, norms=self.plan.norms)

    def prepare(self) -> None:
        """Sets modes; zeroes statistics and optimizers, or sets them to what the client has kept."""
        self.set_mode()
        self.cache.reset()
        self.cache.set_lr(self.lr)
        self.restore()

    def restore(self) -> None:
        """Puts what the client has kept of its optimizers into place."""
        if self.keep_as and self.kept:
            for path, tensor in self.cache.optimizer_state(self.keep_as).items():
                if (kept := self.kept.get(path)) is not None:
                    if kept.shape != tensor.shape:
                        raise UserError(f"{path} has {tuple(kept.shape)}, not {tuple(tensor.shape)}; begin a new run")
                    tensor.copy_(kept)

    def means(self) -> State:
        """Means of what the steps noted; empty if none were taken."""
        return self.cache.means(self.plan.samples) if self.plan.sizes else {}


class Stepper(Protocol):
    """How the steps of a fit are executed."""

    fixed_memory: bool
    """Whether steps are recorded, and read what they train on from the same memory every time."""

    def run(self, steps: Steps) -> State:
        """Takes the steps; returns the means of what they noted."""
        ...


class Eager:
    """Calls the step, as plain PyTorch would."""

    fixed_memory = False

    def run(self, steps: Steps) -> State:
        """One Python call per step."""
        steps.prepare()
        for row in steps.plan.steps(steps.workspace.device):
            steps.step(row)
        return steps.means()


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())
