"""A lane: one place where clients work one after another, in the same memory.

It owns a module tree that every client's state is copied into and out of, what the server sent (`received`), a random
generator, and per call site of `fit` or `steps` the optimizer state and statistics. An engine has one lane or many; how
a step is executed (eagerly, or recorded once and replayed) is the lane's stepper.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedloom.data.batch import Pixels
from fedloom.models import SplitModel
from fedloom.optimizers import Optimizer
from fedloom.parts import Parts, State, snapshot, under
from fedloom.randomness import Dropout, key
from fedloom.training import Training

if TYPE_CHECKING:
    from fedloom.methods.base import Method
    from fedloom.task import Task

Indices = tuple[Tensor, ...]


@dataclass(frozen=True)
class Setup:
    """What every lane of an experiment has in common."""

    task: "Task"
    method: "Method"
    training: Training
    seed: int

    def build(self) -> Parts:
        """The method's parts at their common initial values (built on the CPU: the same on every device)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "init"))
            return Parts(self.method.build(self.task))


@dataclass
class Site:
    """One call site of `fit` or `steps` on one lane: everything a step writes besides the parts."""

    samples: Tensor
    lr: Tensor
    optimizers: dict[tuple[str, ...], Optimizer] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    data: tuple[Tensor, Tensor] | None = None
    captures: dict[Hashable, Any] = field(default_factory=dict)

    def written(self) -> list[Tensor]:
        """Statistics and optimizer state."""
        return [self.samples, *self.sums.values(), *(t for o in self.optimizers.values() for t in o.state())]

    def reset(self) -> None:
        """As if nothing had been trained here yet."""
        for tensor in self.written():
            tensor.zero_()

    def hold(self, data: tuple[Tensor, Tensor], capacity: int) -> None:
        """Copies features into memory of a fixed place, for steps that are recorded."""
        if self.data is None or len(self.data[0]) < len(data[0]):
            capacity = max(capacity, len(data[0]))
            self.data = (data[0].new_zeros(capacity, *data[0].shape[1:]), data[1].new_zeros(capacity))
            self.captures.clear()
        for buffer, values in zip(self.data, data, strict=True):
            buffer[: len(values)].copy_(values)


class Stepper(Protocol):
    """How the steps of a fit are executed."""

    fixed_memory: bool

    def run(self, lane: "Lane", site: Site, step: Callable[[Indices], None], batches: Iterator[Indices]) -> int:
        """Takes a step for every batch; returns how many."""
        ...


class Eager:
    """Calls the step, as plain PyTorch would."""

    fixed_memory = False

    def run(self, lane: "Lane", site: Site, step: Callable[[Indices], None], batches: Iterator[Indices]) -> int:
        """One Python call per batch."""
        count = 0
        for batch in batches:
            step(batch)
            count += 1
        return count


class Lane:
    """Module tree, received state, data and generator on one device."""

    def __init__(
        self,
        setup: Setup,
        *,
        device: torch.device | str = "cpu",
        stepper: Stepper | None = None,
        pixels: Pixels | None = None,
        built: Parts | None = None,
    ):
        self.setup = setup
        self.device = torch.device(device)
        self.stepper: Stepper = stepper or Eager()
        self.pixels = (pixels or setup.task.pixels).to(self.device)
        self.generator = torch.Generator(self.device)
        self.parts = deepcopy(built or setup.build()).to(self.device)
        self.initial = snapshot(self.parts)
        tops = dict.fromkeys(path.split(".")[0] for path in setup.method.down)
        self.received = Parts({top: deepcopy(getattr(self.parts, top)) for top in tops})
        self.received.requires_grad_(False).eval()
        for module in (*self.parts.modules(), *self.received.modules()):
            if isinstance(module, Dropout):
                module.generator = self.generator
        self.sites: dict[Hashable, Site] = {}
        self._parameters: dict[tuple[str, ...], list[Tensor]] = {}
        self.private = tuple(n for n, module in self.parts.named_modules() if getattr(module, "stays_local", False))
        """Paths inside shared parts that never leave a client: slow copies, queues."""

    def outgoing(self) -> State:
        """What a client sends."""
        sent = snapshot(self.parts, self.setup.method.up)
        return {name: tensor for name, tensor in sent.items() if not under(name, self.private)}

    def downward(self) -> State:
        """What a server holds for its clients, at the values that the parts have now."""
        held = snapshot(self.parts, self.setup.method.down)
        return {name: tensor for name, tensor in held.items() if not under(name, self.private)}

    def kept(self) -> State:
        """What stays with a client between rounds."""
        return snapshot(self.parts, (*self.setup.method.keeps, *self.private))

    def load(self, message: Mapping[str, Tensor], memory: State | None) -> None:
        """Makes this lane a client's: initial values ← received ← memory."""
        with torch.no_grad():
            received = self.received.named_tensors()
            for name, tensor in received.items():
                tensor.copy_(message.get(name, self.initial[name]))
            memory = memory or {}
            for name, tensor in self.parts.named_tensors().items():
                value = memory.get(name)
                if value is None:
                    value = message.get(name)
                tensor.copy_(self.initial[name] if value is None else value)

    def parameters(self, paths: tuple[str, ...]) -> list[Tensor]:
        """Trainable tensors under these paths (asked for in every step, so found once)."""
        if paths not in self._parameters:
            self._parameters[paths] = [p for name, p in self.parts.named_parameters() if under(name, paths)]
        return self._parameters[paths]

    def networks_in(self, paths: tuple[str, ...]) -> list[SplitModel]:
        """Networks of which some part is under these paths."""
        return [
            module
            for name, module in self.parts.named_modules()
            if isinstance(module, SplitModel) and (under(name, paths) or any(under(path, (name,)) for path in paths))
        ]

    def site(self, where: Hashable, optimized: Iterable[tuple[str, ...]]) -> Site:
        """The call site's statistics and optimizers, made on first use, zeroed on each."""
        site = self.sites.get(where)
        if site is None:
            zero = torch.zeros((), device=self.device)
            site = self.sites[where] = Site(samples=zero, lr=zero.clone())
            settings = self.setup.training.optimizer
            site.optimizers = {paths: Optimizer(self.parameters(paths), settings) for paths in optimized}
        site.reset()
        return site

    def train_only(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """Parts being fitted learn and are in train mode; all others are frozen and in eval mode, buffers included.

        Without `norms`, batch-norm stays in eval mode everywhere: one sample has no variance.
        """
        for name, module in self.parts.named_modules():
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            module.training = bool(name) and under(name, paths) and (norms or not batch_norm)
        for name, parameter in self.parts.named_parameters():
            parameter.requires_grad_(under(name, paths))
        for name, buffer in self.parts.named_buffers():
            if buffer.requires_grad:
                raise RuntimeError(f"{name} is a tensor part that requires a gradient: register it as nn.Parameter")
