"""The workspace: memory in which clients work one after another.

It holds a module tree that each client's state is copied into and out of, what the server sent (`received`), a random
generator, and per call of `fit` or `steps` the optimizer state and statistics. An engine has one workspace or many; how
a step is executed (eagerly, or recorded once and replayed) is the workspace's stepper.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedloom.core.batches import Indices, Pixels, Plan
from fedloom.core.compression import Codec, WireSettings
from fedloom.core.optimizers import Optimizer, Training
from fedloom.core.protocols import MethodLike, Network, is_network
from fedloom.core.rng import Dropout, key
from fedloom.core.state import Parts, State, copies, copy_all_, under
from fedloom.core.task import Task

EVALUATION_BATCH = 512
"""Images of one forward pass in evaluation; on a GPU small images go in larger batches."""
EVALUATION_PIXELS = 2048 * 32 * 32


@dataclass(frozen=True)
class Setup:
    """What every workspace of an experiment has in common."""

    task: Task
    method: MethodLike
    training: Training
    seed: int
    wire: WireSettings = field(default_factory=WireSettings)
    intercept: Callable[..., Any] | None = None
    """Called as `intercept(work, workspace, job)` in place of a job's work, on the client's side (injected faults)."""

    @cached_property
    def codec(self) -> Codec:
        """Encodes and decodes messages."""
        return Codec(self.wire, exact=(*self.method.by.values(), *self.method.sums))

    def build(self) -> Parts:
        """The method's parts at their common initial values (built on the CPU: the same on every device)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "init"))
            return Parts(self.method.build(self.task))


@dataclass
class StepCache:
    """What the steps of one call of `fit` or `steps` write besides the parts, and recordings of them."""

    site: Hashable
    """Identifies the call."""
    parts: tuple[str, ...]
    """Parts that it trains."""
    lr: Tensor
    rate: tuple[float, Tensor] | None = None
    """What `lr` holds, and a copy of it for results."""
    optimizers: dict[tuple[str, ...], Optimizer] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    data: tuple[Tensor, Tensor] | None = None
    """Features and labels that the steps train on, where they are not images."""
    captures: dict[Hashable, Any] = field(default_factory=dict)

    def written(self) -> list[Tensor]:
        """Statistics and optimizer state."""
        return [*self.sums.values(), *(t for o in self.optimizers.values() for t in o.state())]

    def reset(self) -> None:
        """As if nothing had been trained here yet."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self.written():
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_type.values():
            torch._foreach_zero_(tensors)

    def set_lr(self, value: float) -> Tensor:
        """The learning rate from now on; returns a tensor that stays as it is."""
        if self.rate is None or self.rate[0] != value:
            self.lr.fill_(value)
            self.rate = value, self.lr.clone()
        return self.rate[1]

    def optimizer_state(self, name: str) -> list[tuple[str, Tensor]]:
        """All optimizers' state, by the names it has in a client's memory."""
        return [
            (f"optim.{name}.{'+'.join(paths)}.{i}", tensor)
            for paths, optimizer in self.optimizers.items()
            for i, tensor in enumerate(optimizer.state())
        ]

    def hold(self, data: tuple[Tensor, Tensor], capacity: int | None) -> None:
        """Sets the features to train on; with a capacity, in memory of a fixed place, for steps that are recorded."""
        if capacity is None:
            self.data = data
            return
        if self.data is None or len(self.data[0]) < len(data[0]):
            capacity = max(capacity, len(data[0]))
            self.data = (data[0].new_zeros(capacity, *data[0].shape[1:]), data[1].new_zeros(capacity))
            self.captures.clear()
        for buffer, values in zip(self.data, data, strict=True):
            buffer[: len(values)].copy_(values)


class Stepper(Protocol):
    """How the steps of a fit are executed."""

    fixed_memory: bool

    def run(self, workspace: "Workspace", cache: StepCache, step: Callable[[Indices], None], plan: Plan) -> None:
        """Takes the plan's steps."""
        ...


class Eager:
    """Calls the step, as plain PyTorch would."""

    fixed_memory = False

    def run(self, workspace: "Workspace", cache: StepCache, step: Callable[[Indices], None], plan: Plan) -> None:
        """One Python call per step."""
        for indices in plan.steps(workspace.device):
            step(indices)


@dataclass(frozen=True)
class Precision:
    """Number format and memory layout in which networks are computed."""

    bf16: bool = False
    channels_last: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Of images and convolutions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


class Workspace:
    """Module tree, received state, data and generator on one device."""

    def __init__(
        self,
        setup: Setup,
        *,
        device: torch.device | str = "cpu",
        stepper: Stepper | None = None,
        pixels: Pixels | None = None,
        built: Parts | None = None,
        precision: Precision | None = None,
    ):
        self.setup = setup
        self.device = torch.device(device)
        self.stepper: Stepper = stepper or Eager()
        self.precision = precision or Precision()
        layout = self.precision.layout
        self.pixels = (pixels or setup.task.pixels).to(self.device, layout)
        self.parts = deepcopy(built or setup.build()).to(self.device)
        self.parts.to(memory_format=layout)  # type: ignore[call-overload]
        tops = dict.fromkeys(path.split(".")[0] for path in setup.method.down)
        self.received = Parts({top: deepcopy(getattr(self.parts, top)) for top in tops})
        self.received.requires_grad_(False).eval()
        self.renew_generator()
        self.tensors = self.parts.named_tensors()
        """Every tensor of the parts by name. The tree never changes, only what is in it."""
        self.initial = copies(self.tensors)
        self.holds: Mapping[str, Tensor] | None = None
        """A message that has been put into this workspace already, without any client's memory."""
        self.caches: dict[Hashable, StepCache] = {}
        self._received = self.received.named_tensors()
        self._parameters: dict[tuple[str, ...], list[Tensor]] = {}
        self._networks: dict[tuple[str, ...], list[Network]] = {}
        self._modes: dict[Hashable, tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]] = {}
        self.private = tuple(n for n, module in self.parts.named_modules() if getattr(module, "stays_local", False))
        """Paths inside shared parts that never leave a client: slow copies, queues."""

    def renew_generator(self) -> None:
        """A new generator, for everything that draws: every fit seeds it anew."""
        self.generator = torch.Generator(self.device)
        for module in (*self.parts.modules(), *self.received.modules()):
            if isinstance(module, Dropout):
                module.generator = self.generator

    def autocast(self) -> AbstractContextManager[None]:
        """What networks run under. Nothing is cached: a step may change weights and use them again."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.bf16, cache_enabled=False)

    @cached_property
    def evaluation_batch(self) -> int:
        """Images of one forward pass without gradients."""
        if self.device.type == "cpu":
            return EVALUATION_BATCH
        return max(EVALUATION_BATCH, EVALUATION_PIXELS // self.pixels.images[0, 0].numel())

    def outgoing(self) -> State:
        """What a client sends."""
        return copies(self.sent)

    def downward(self) -> State:
        """What a server holds for its clients, at the values that the parts have now."""
        return self._copies(self._names(self.setup.method.down))

    def unshared(self) -> State:
        """Initial values of what no server holds: what is never trained is needed for use all the same."""
        held = set(self._names(self.setup.method.down))
        return {name: value for name, value in self.initial.items() if name not in held}

    def kept(self) -> State:
        """What stays with a client between rounds."""
        return self._copies(self._kept)

    @cached_property
    def sent(self) -> State:
        """The tensors that a client sends: themselves, not copies."""
        return {name: self.tensors[name] for name in self._names(self.setup.method.up)}

    @cached_property
    def _kept(self) -> list[str]:
        return [name for name in self.tensors if under(name, (*self.setup.method.keeps, *self.private))]

    def _names(self, paths: tuple[str, ...]) -> list[str]:
        return [name for name in self.tensors if under(name, paths) and not under(name, self.private)]

    def _copies(self, names: list[str]) -> State:
        return copies({name: self.tensors[name] for name in names})

    def load(self, message: Mapping[str, Tensor], memory: State | None) -> None:
        """Makes this workspace a client's: initial values ← received ← memory."""
        held, self.holds = self.holds, None
        own = memory or {}
        if held is message:  # only what the client keeps is missing
            kept = [name for name in own if name in self.tensors]
            copy_all_([self.tensors[name] for name in kept], [own[name] for name in kept])
            return
        received = self.initial | dict(message.items())
        own = received | own
        copy_all_(
            [*self._received.values(), *self.tensors.values()],
            [*(received[name] for name in self._received), *(own[name] for name in self.tensors)],
        )

    def filled(self) -> list[tuple[str, Tensor]]:
        """What `load` writes, by name: what is received, and the parts."""
        return [*self._received.items(), *self.tensors.items()]

    def parameters(self, paths: tuple[str, ...]) -> list[Tensor]:
        """Trainable tensors under these paths (asked for in every step, so found once)."""
        if paths not in self._parameters:
            self._parameters[paths] = [p for name, p in self.parts.named_parameters() if under(name, paths)]
        return self._parameters[paths]

    @cached_property
    def _places(self) -> list[tuple[str, dict[str, Any], str, Tensor, int]]:
        """Where every tensor hangs in the tree, and its address."""
        return [
            (f"{path}.{name}".lstrip("."), table, name, tensor, tensor.data_ptr())
            for path, module in self.parts.named_modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def moved(self) -> str | None:
        """The first tensor that is no longer where it was when this was first asked."""
        for path, table, name, tensor, address in self._places:
            if table.get(name) is not tensor or tensor.data_ptr() != address:
                return path
        return None

    @cached_property
    def networks(self) -> list[Network]:
        """All networks."""
        return [module for module in self.parts.modules() if is_network(module)]

    def networks_in(self, paths: tuple[str, ...]) -> list[Network]:
        """Networks of which some part is under these paths."""
        if paths not in self._networks:
            self._networks[paths] = [
                module
                for name, module in self.parts.named_modules()
                if is_network(module) and (under(name, paths) or any(under(path, (name,)) for path in paths))
            ]
        return self._networks[paths]

    def step_cache(self, site: Hashable, parts: tuple[str, ...], optimized: Iterable[tuple[str, ...]]) -> StepCache:
        """Statistics and optimizers of a call of `fit` or `steps`: made on first use, zeroed on each."""
        cache = self.caches.get(site)
        if cache is None:
            cache = self.caches[site] = StepCache(site, parts, lr=torch.zeros((), device=self.device))
            settings = self.setup.training.optimizer
            cache.optimizers = {paths: Optimizer(self.parameters(paths), settings) for paths in optimized}
        cache.reset()
        return cache

    def train_only(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """Parts being fitted learn and are in train mode; all others are frozen and in eval mode, buffers included.

        Without `norms`, batch-norm stays in eval mode everywhere: one sample has no variance.
        """
        if (paths, norms) not in self._modes:
            self._modes[paths, norms] = self._mode(paths, norms)
        modules, parameters = self._modes[paths, norms]
        for module, training in modules:
            if module.training is not training:
                module.training = training
        for parameter, learns in parameters:
            parameter.requires_grad_(learns)

    def _mode(
        self, paths: tuple[str, ...], norms: bool
    ) -> tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]:
        for name, buffer in self.parts.named_buffers():
            if buffer.requires_grad:
                raise RuntimeError(f"{name} is a tensor part that requires a gradient: register it as nn.Parameter")
        modules = []
        for name, module in self.parts.named_modules():
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            modules.append((module, bool(name) and under(name, paths) and (norms or not batch_norm)))
        return modules, [(p, under(name, paths)) for name, p in self.parts.named_parameters()]
