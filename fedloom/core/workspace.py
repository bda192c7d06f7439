"""The workspace: memory in which clients are processed one after another.

It holds a module tree that each client's state is copied into and out of, the parts that the server sent (`received`),
the random numbers, and the optimizer state and statistics of every call of `fit` or `steps`. Parameters and buffers are
views of one buffer per dtype. An engine has one or more workspaces. The workspace's stepper determines how steps are
executed: eagerly, or recorded once and replayed.
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
from fedloom.core.metrics import Metric
from fedloom.core.optimizers import Training
from fedloom.core.protocols import MethodLike, Network, is_network
from fedloom.core.rng import Dropout, Random, key
from fedloom.core.state import FlatState, Layout, Parts, State, copies, copy_all_, under
from fedloom.core.step_cache import Rows, StepCache
from fedloom.core.task import Task

EVALUATION_BATCH = 512
"""Images per forward pass in evaluation; small images on a GPU use larger batches."""
EVALUATION_PIXELS = 2048 * 32 * 32


@dataclass(frozen=True)
class Setup:
    """The configuration that all workspaces of an experiment share."""

    task: Task
    method: MethodLike
    training: Training
    seed: int
    wire: WireSettings = field(default_factory=WireSettings)
    intercept: Callable[..., Any] | None = None
    """Called as `intercept(work, workspace, job)` instead of a job's work, on the client's side (fault injection)."""
    metrics: tuple[Metric, ...] = ()
    """Figures of an evaluation besides accuracy and loss."""

    @cached_property
    def statistics(self) -> dict[Hashable, dict[str, int]]:
        """Positions of statistics by call site. Equal in all workspaces, because they share recorded steps."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Omit positions of statistics, which every worker process assigns separately."""
        return {name: value for name, value in vars(self).items() if name != "statistics"}

    @cached_property
    def codec(self) -> Codec:
        """Encodes and decodes messages."""
        return Codec(self.wire, exact=(*self.method.by.values(), *self.method.sums))

    def build(self) -> Parts:
        """Return the method's parts with their initial values; built on the CPU, so that devices do not differ."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "init"))
            return Parts(self.method.build(self.task))


@dataclass(frozen=True)
class Precision:
    """Number format and memory layout of network computations."""

    bf16: bool = False
    channels_last: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Memory layout of images and convolutions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class Steps:
    """One client's training steps of one call of `fit` or `steps`."""

    workspace: "Workspace"
    cache: StepCache
    step: Callable[[Row], None]
    plan: Plan
    lr: float
    kept: State = field(default_factory=dict)
    """Optimizer state from the client's last round, by the names of `cache.optimizer_state`."""
    keep_as: str | None = None

    def set_mode(self) -> None:
        """Set trained parts to train mode and all others to eval mode."""
        self.workspace.train_only(self.cache.parts, norms=self.plan.norms)

    def prepare(self) -> None:
        """Set modes and learning rate; zero statistics and optimizers, or restore kept optimizer state."""
        self.set_mode()
        self.cache.reset()
        self.cache.set_lr(self.lr)
        self.restore()

    def restore(self) -> None:
        """Restore the optimizer state that the client has kept.

        Raises:
            UserError: Its shape has changed.
        """
        if self.keep_as and self.kept:
            for path, tensor in self.cache.optimizer_state(self.keep_as).items():
                if (kept := self.kept.get(path)) is not None:
                    if kept.shape != tensor.shape:
                        raise UserError(
                            f"{path} has shape {tuple(kept.shape)}, not {tuple(tensor.shape)}; start a new run"
                        )
                    tensor.copy_(kept)

    def means(self) -> State:
        """Return the means of the statistics; empty if no steps were taken."""
        return self.cache.means(self.plan.samples) if self.plan.sizes else {}


class Stepper(Protocol):
    """Executes the steps of a fit."""

    fixed_memory: bool
    """Whether steps are recorded, which requires training data at fixed addresses."""

    def run(self, steps: Steps) -> State:
        """Take the steps and return the means of their statistics."""
        ...


class Eager:
    """Executes steps like ordinary PyTorch code."""

    fixed_memory = False

    def run(self, steps: Steps) -> State:
        """Take the steps, one Python call each."""
        steps.prepare()
        for row in steps.plan.steps(steps.workspace.device):
            steps.step(row)
        return steps.means()


class Workspace:
    """Module tree, received parts, data and random numbers on one device."""

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
        """All tensors of the parts by name. The tensors are fixed; only their values change."""
        self.initial = copies(self.tensors)
        self.holds: Mapping[str, Tensor] | None = None
        """The message that is already loaded into this workspace, without any client's memory."""
        self.outbox: FlatState | None = None
        """Memory in which an engine collects the client's message when the client has finished."""
        self.caches: dict[Hashable, StepCache] = {}
        self._received = self.received.named_tensors()
        self._parameters: dict[tuple[str, ...], list[Tensor]] = {}
        self._networks: dict[tuple[str, ...], list[Network]] = {}
        self._constants: dict[float, Tensor] = {}
        self._modes: dict[Hashable, tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]] = {}
        self._in_mode: tuple[tuple[str, ...], bool] | None = None
        self.private = tuple(n for n, module in self.parts.named_modules() if getattr(module, "stays_local", False))
        """Paths inside shared parts that never leave a client: momentum encoders, queues."""
        self.fixed = tuple(n for n, module in self.parts.named_modules() if getattr(module, "stays_fixed", False))
        """Paths of frozen parts. They have their initial values everywhere, so they are neither sent nor kept."""
        self._places  # noqa: B018  records all addresses

    def _flattened(self, parts: Parts, name: str) -> FlatState:
        """Move all tensors of a tree into one buffer per dtype; the tensor objects stay the same."""
        tensors = parts.in_tree_order()
        layout = Layout.of(tensors)
        buffers = {dtype: self.allocate((name, dtype), (size,), dtype) for dtype, size in layout.sizes.items()}
        flat = FlatState(layout, buffers)
        copy_all_(list(flat.values()), list(tensors.values()))
        for name, view in flat.items():
            tensors[name].data = view
        return flat

    def allocate(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros identified by a name; a row of a shared block if the workspace belongs to a cohort."""
        if self._rows is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        rows, number = self._rows
        return rows.zeros(name, number, shape, dtype, self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of networks; casts are not cached, because a step may change weights."""
        if not self.precision.bf16 and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.bf16, cache_enabled=False)

    @cached_property
    def evaluation_batch(self) -> int:
        """Images per forward pass without gradients."""
        if self.device.type == "cpu":
            return EVALUATION_BATCH
        return max(EVALUATION_BATCH, EVALUATION_PIXELS // max(1, self.pixels.images[0, 0].numel()))

    def outgoing(self) -> FlatState:
        """Return the tensors that a client sends: a copy, or memory that an engine fills afterwards."""
        return self.flat.select(self.sent_layout) if self.outbox is None else self.outbox

    @cached_property
    def sent_layout(self) -> Layout:
        """Layout of the tensors that a client sends."""
        names = set(self._names(self.setup.method.up))
        return Layout.of({name: tensor for name, tensor in self.flat.items() if name in names})

    def downward(self) -> State:
        """Return the parts that the server holds for clients, with their current values."""
        return self._copies(self._names(self.setup.method.down))

    def unshared(self) -> State:
        """Return initial values of all tensors that the server does not hold, which inference needs."""
        held = set(self._names(self.setup.method.down))
        return {name: value for name, value in self.initial.items() if name not in held}

    def kept(self) -> State:
        """Return the tensors that a client keeps between rounds."""
        return self._copies(self._kept)

    @cached_property
    def sent(self) -> State:
        """The tensors that a client sends, without copying."""
        return {name: self.tensors[name] for name in self._names(self.setup.method.up)}

    @cached_property
    def _kept(self) -> list[str]:
        keeps = (*self.setup.method.keeps, *self.private)
        return [name for name in self.tensors if under(name, keeps) and not under(name, self.fixed)]

    def _names(self, paths: tuple[str, ...]) -> list[str]:
        without = (*self.private, *self.fixed)
        return [name for name in self.tensors if under(name, paths) and not under(name, without)]

    def _copies(self, names: list[str]) -> State:
        return copies({name: self.tensors[name] for name in names})

    def load(self, message: Mapping[str, Tensor], memory: Mapping[str, Tensor] | None) -> None:
        """Load a client: initial values, overwritten by the message, overwritten by the client's memory."""
        held, self.holds = self.holds, None
        if held is not message:
            self.receive(message, self.flat, self.flat_received)
        if memory:
            kept = [name for name in memory if name in self.tensors]
            copy_all_([self.tensors[name] for name in kept], [memory[name] for name in kept])

    def receive(self, message: Mapping[str, Tensor], parts: FlatState, received: FlatState) -> None:
        """Write initial values, overwritten by a message, into the parts and received parts of one or all rows."""
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
        """Return the trainable tensors under some paths; cached, because every step calls it."""
        if paths not in self._parameters:
            self._parameters[paths] = [p for name, p in self.parts.named_parameters() if under(name, paths)]
        return self._parameters[paths]

    def refuse_rebound(self) -> None:
        """Check that all tensors are at their original addresses; otherwise restore the tree and raise an error.

        Raises:
            CaptureError: Names the tensor that was replaced.
        """
        if (moved := self.moved()) is None:
            return
        for path, table, name, tensor, _ in self._places:
            table[name] = tensor
            tensor.data = self.flat[path]
        raise CaptureError(f"part '{moved}' was rebound (p.data = … or an assignment); write in place instead: copy_")

    @cached_property
    def _places(self) -> list[tuple[str, dict[str, Any], str, Tensor, int]]:
        """Path, containing table, name and address of every tensor in the tree."""
        return [
            (f"{path}.{name}".lstrip("."), table, name, tensor, tensor.data_ptr())
            for path, module in self.parts.named_modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def moved(self) -> str | None:
        """Return the path of the first tensor that is not at its original address; None if there is none."""
        for path, table, name, tensor, address in self._places:
            if table.get(name) is not tensor or tensor.data_ptr() != address:
                return path
        return None

    @cached_property
    def networks(self) -> list[Network]:
        """All networks in the tree."""
        return [module for module in self.parts.modules() if is_network(module)]

    def networks_in(self, paths: tuple[str, ...]) -> list[Network]:
        """Return the networks that overlap with these paths."""
        if paths not in self._networks:
            self._networks[paths] = [
                module
                for name, module in self.parts.named_modules()
                if is_network(module) and (under(name, paths) or any(under(path, (name,)) for path in paths))
            ]
        return self._networks[paths]

    def step_cache(self, site: Hashable, parts: tuple[str, ...], optimized: Iterable[tuple[str, ...]]) -> StepCache:
        """Return the statistics and optimizers of a call site, created on first use."""
        if site not in self.caches:
            names = self.setup.statistics.setdefault(site, {})
            groups = {paths: self.parameters(paths) for paths in optimized}
            settings = self.setup.training.optimizer
            self.caches[site] = StepCache(site, parts, groups, settings, self.allocate, names)
        return self.caches[site]

    def constant(self, value: float) -> Tensor:
        """Return a number as a cached 0-d tensor."""
        if value not in self._constants:
            self._constants[value] = torch.full((), value, device=self.device)
        return self._constants[value]

    def train_only(self, paths: tuple[str, ...], *, norms: bool) -> None:
        """Set the parts under `paths` to train mode; freeze all others, including buffers, and set them to eval mode.

        Parts that `model.freeze` names are always in eval mode.

        Without `norms`, all batch-norm layers are in eval mode: one sample has no variance.
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
        """Set modes like `train_only`, unless they are already set."""
        if self._in_mode != (paths, norms):
            self.train_only(paths, norms=norms)

    def evaluate_only(self) -> None:
        """Set everything to eval mode."""
        self._in_mode = None
        self.parts.eval()

    def _mode(
        self, paths: tuple[str, ...], norms: bool
    ) -> tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]:
        for name, buffer in self.parts.named_buffers():
            if buffer.requires_grad:
                raise RuntimeError(
                    f"part '{name}' is a tensor that requires a gradient; make it an nn.Parameter of a module"
                )
        modules = []
        for name, module in self.parts.named_modules():
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            trained = bool(name) and under(name, paths) and not under(name, self.fixed)
            modules.append((module, trained and (norms or not batch_norm)))
        return modules, [(p, under(name, paths)) for name, p in self.parts.named_parameters()]
