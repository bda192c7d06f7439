"""The workspace: memory in which clients work one after another.

It holds a module tree that each client's state is copied into and out of, what the server sent (`received`), the source
of random numbers, and per call of `fit` or `steps` the optimizer state and statistics. Parameters and buffers are views
of one buffer per dtype. An engine has one workspace or many; how a step is executed (eagerly, or recorded once and
replayed) is the workspace's stepper.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedloom.core.batches import Pixels, Plan, Row
from fedloom.core.compression import Codec, WireSettings
from fedloom.core.errors import UserError
from fedloom.core.fit import CaptureError
from fedloom.core.optimizers import Training
from fedloom.core.protocols import MethodLike, Network, is_network
from fedloom.core.rng import Dropout, Random, key
from fedloom.core.state import FlatState, Layout, Parts, State, copies, copy_all_, under
from fedloom.core.step_cache import Rows, StepCache
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
    def statistics(self) -> dict[Hashable, dict[str, int]]:
        """Positions of what steps note, by call site: the same in all workspaces, which share recorded steps."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process needs; positions of statistics are its own."""
        return {name: value for name, value in vars(self).items() if name != "statistics"}

    @cached_property
    def codec(self) -> Codec:
        """Encodes and decodes messages."""
        return Codec(self.wire, exact=(*self.method.by.values(), *self.method.sums))

    def build(self) -> Parts:
        """The method's parts at their common initial values (built on the CPU: the same on every device)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "init"))
            return Parts(self.method.build(self.task))


@dataclass(frozen=True)
class Precision:
    """Number format and memory layout in which networks are computed."""

    bf16: bool = False
    channels_last: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Of images and convolutions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


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


class Workspace:
    """Module tree, received state, data and random numbers on one device."""

    def __init__(
        self,
        setup: Setup,
        *,
        device: torch.device | str = "cpu",
        stepper: Stepper | None = None,
        pixels: Pixels | None = None,
        built: Parts | None = None,
        precision: Precision | None = None,
        rows: tuple[Rows, int] | None = None,
    ):
        self.setup = setup
        self.device = torch.device(device)
        self.stepper: Stepper = stepper or Eager()
        self.precision = precision or Precision()
        layout = self.precision.layout
        self.pixels = (pixels or setup.task.pixels).to(self.device, layout)
        self._rows = rows
        self.parts = deepcopy(built or setup.build()).to(self.device)
        self.parts.to(memory_format=layout)  # type: ignore[call-overload]
        tops = dict.fromkeys(path.split(".")[0] for path in setup.method.down)
        self.received = Parts({top: deepcopy(getattr(self.parts, top)) for top in tops})
        self.received.requires_grad_(False).eval()
        self.flat, self.flat_received = self._flattened(self.parts, "parts"), self._flattened(self.received, "received")
        self.random = Random(self.device)
        for module in (*self.parts.modules(), *self.received.modules()):
            if isinstance(module, Dropout):
                module.random = self.random
        self.tensors = self.parts.named_tensors()
        """Every tensor of the parts by name. The tree never changes, only what is in it."""
        self.initial = copies(self.tensors)
        self.holds: Mapping[str, Tensor] | None = None
        """A message that has been put into this workspace already, without any client's memory."""
        self.outbox: FlatState | None = None
        """Where an engine puts what the client sends, when it is done."""
        self.caches: dict[Hashable, StepCache] = {}
        self._received = self.received.named_tensors()
        self._parameters: dict[tuple[str, ...], list[Tensor]] = {}
        self._networks: dict[tuple[str, ...], list[Network]] = {}
        self._constants: dict[float, Tensor] = {}
        self._modes: dict[Hashable, tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]] = {}
        self._in_mode: tuple[tuple[str, ...], bool] | None = None
        self.private = tuple(n for n, module in self.parts.named_modules() if getattr(module, "stays_local", False))
        """Paths inside shared parts that never leave a client: slow copies, queues."""
        self._places  # noqa: B018  where everything is from now on

    def _flattened(self, parts: Parts, name: str) -> FlatState:
        """Moves all tensors of a tree into one buffer per dtype; they stay the objects that they are."""
        tensors = parts.in_tree_order()
        layout = Layout.of(tensors)
        buffers = {dtype: self.allocate((name, dtype), (size,), dtype) for dtype, size in layout.sizes.items()}
        flat = FlatState(layout, buffers)
        copy_all_(list(flat.values()), list(tensors.values()))
        for name, view in flat.items():
            tensors[name].data = view
        return flat

    def allocate(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros under a name of their own; a row of a block where workspaces lie side by side."""
        if self._rows is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        rows, number = self._rows
        return rows.zeros(name, number, shape, dtype, self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """What networks run under. Nothing is cached: a step may change weights and use them again."""
        if not self.precision.bf16 and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.bf16, cache_enabled=False)

    @cached_property
    def evaluation_batch(self) -> int:
        """Images of one forward pass without gradients."""
        if self.device.type == "cpu":
            return EVALUATION_BATCH
        return max(EVALUATION_BATCH, EVALUATION_PIXELS // self.pixels.images[0, 0].numel())

    def outgoing(self) -> FlatState:
        """What a client sends: a copy, or memory that an engine fills when the client is done."""
        return self.flat.select(self.sent_layout) if self.outbox is None else self.outbox

    @cached_property
    def sent_layout(self) -> Layout:
        """Where what a client sends lies in a flat message."""
        names = set(self._names(self.setup.method.up))
        return Layout.of({name: tensor for name, tensor in self.flat.items() if name in names})

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

    def load(self, message: Mapping[str, Tensor], memory: Mapping[str, Tensor] | None) -> None:
        """Makes this workspace a client's: initial values ← received ← memory."""
        held, self.holds = self.holds, None
        if held is not message:
            self.receive(message, self.flat, self.flat_received)
        if memory:
            kept = [name for name in memory if name in self.tensors]
            copy_all_([self.tensors[name] for name in kept], [memory[name] for name in kept])

    def receive(self, message: Mapping[str, Tensor], parts: FlatState, received: FlatState) -> None:
        """Puts initial values, then a message, into flat parts and received parts: this workspace's, or all rows'."""
        tensors = getattr(message, "tensors", message)
        for target in (parts, received):
            missing = [name for name in target if name not in tensors]
            copy_all_(
                [target[name] for name in missing], [self.initial[name].expand_as(target[name]) for name in missing]
            )
            if isinstance(tensors, FlatState):
                target.take(tensors)
            else:
                known = [name for name in tensors if name in target]
                copy_all_([target[name] for name in known], [tensors[name].expand_as(target[name]) for name in known])

    def parameters(self, paths: tuple[str, ...]) -> list[Tensor]:
        """Trainable tensors under these paths (asked for in every step, so found once)."""
        if paths not in self._parameters:
            self._parameters[paths] = [p for name, p in self.parts.named_parameters() if under(name, paths)]
        return self._parameters[paths]

    def refuse_rebound(self) -> None:
        """Refuses a tensor that is no longer where it was made, and puts the tree back.

        Raises:
            CaptureError: Names the tensor.
        """
        if (moved := self.moved()) is None:
            return
        for path, table, name, tensor, _ in self._places:
            table[name] = tensor
            tensor.data = self.flat[path]
        raise CaptureError(f"part '{moved}' was rebound (p.data = … or an assignment): write in place, copy_")

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
        """The first tensor that is no longer where it was made."""
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
        """Statistics and optimizers of a call of `fit` or `steps`, made on first use."""
        if site not in self.caches:
            names = self.setup.statistics.setdefault(site, {})
            groups = {paths: self.parameters(paths) for paths in optimized}
            settings = self.setup.training.optimizer
            self.caches[site] = StepCache(site, parts, groups, settings, self.allocate, names)
        return self.caches[site]

    def constant(self, value: float) -> Tensor:
        """A number as a 0-d tensor, made once."""
        if value not in self._constants:
            self._constants[value] = torch.full((), value, device=self.device)
        return self._constants[value]

    def train_only(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """Parts being fitted learn and are in train mode; all others are frozen and in eval mode, buffers included.

        Without `norms`, batch-norm stays in eval mode everywhere: one sample has no variance.
        """
        self._in_mode = paths, norms
        if (paths, norms) not in self._modes:
            self._modes[paths, norms] = self._mode(paths, norms)
        modules, parameters = self._modes[paths, norms]
        for module, training in modules:
            if module.training is not training:
                module.training = training
        for parameter, learns in parameters:
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)

    def expect_mode(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """The same before a fit whose steps another workspace may take: not again if it was the last thing done."""
        if self._in_mode != (paths, norms):
            self.train_only(paths, norms=norms)

    def evaluate_only(self) -> None:
        """Puts everything into eval mode."""
        self._in_mode = None
        self.parts.eval()

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
