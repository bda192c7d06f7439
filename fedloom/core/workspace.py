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
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.addresses import Addresses
from fedloom.core.batches import Plan, Row, StoredSamples
from fedloom.core.errors import UserError
from fedloom.core.features import compute_features
from fedloom.core.fit import CaptureError
from fedloom.core.flat_state import FlatState, Layout
from fedloom.core.frozen import fixed_paths, share
from fedloom.core.modes import Modes
from fedloom.core.optimizers import TORCH_OPTIMIZERS
from fedloom.core.protocols import Network, is_network
from fedloom.core.rng import Dropout, Random
from fedloom.core.setup import Precision, Setup
from fedloom.core.state import Parts, State, copies, copy_all_, under
from fedloom.core.step_cache import Rows, StepCache

EVALUATION_BATCH = 512
"""Images per forward pass in evaluation; small images on a GPU use larger batches."""
EVALUATION_PIXELS = 2048 * 32 * 32


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
        self.workspace.modes.train_only(self.cache.parts, norms=self.plan.norms)

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
        stored: StoredSamples | None = None,
        built: Parts | None = None,
        precision: Precision | None = None,
        rows: tuple[Rows, int] | None = None,
    ):
        self.setup = setup
        self.device = torch.device(device)
        self.stepper: Stepper = stepper or Eager()
        if self.stepper.fixed_memory and setup.training.optimizer.name in TORCH_OPTIMIZERS:
            raise UserError(
                "training.optimizer: steps of a torch.optim optimizer cannot be recorded on this engine, because it "
                "keeps its step count and state in Python; use engine='inline' or 'processes', an object with a "
                "function direction(), or a built-in optimizer"
            )
        self.precision = precision or Precision()
        layout = self.precision.layout
        self.stored = (stored or setup.task.stored).to(self.device, layout)
        self._rows = rows
        self.parts = deepcopy(built or setup.build()).to(self.device)
        self.parts.to(memory_format=layout)  # type: ignore[call-overload]
        tops = dict.fromkeys(path.split(".")[0] for path in setup.method.down)
        self.received = Parts({top: deepcopy(getattr(self.parts, top)) for top in tops})
        self.received.requires_grad_(False).eval()
        self.fixed = fixed_paths(self.parts)
        """Paths of frozen parts. They have their initial values everywhere, so they are neither sent nor kept, and all
        workspaces share their memory."""
        common = setup.frozen_tensors.setdefault((self.device, layout), {})
        for tree in (self.parts, self.received):
            share(tree, self.fixed, common)
        self.flat, self.flat_received = self._flattened(self.parts, "parts"), self._flattened(self.received, "received")
        self.random = Random(self.device)
        for module in (*self.parts.modules(), *self.received.modules()):
            if isinstance(module, Dropout):
                module.random = self.random
        self.tensors = self.parts.named_tensors()
        """All tensors of the parts by name. The tensors are fixed; only their values change."""
        moving = copies(self.changing())
        self.initial = {name: moving[name] if name in moving else t.detach() for name, t in self.tensors.items()}
        self.holds: Mapping[str, Tensor] | None = None
        """The message that is already loaded into this workspace, without any client's memory."""
        self.outbox: FlatState | None = None
        """Memory in which an engine collects the client's message when the client has finished."""
        self.caches: dict[Hashable, StepCache] = {}
        self._parameters: dict[tuple[str, ...], list[Tensor]] = {}
        self.modes = Modes(self.parts, self.fixed)
        self._addresses = Addresses(self.parts)
        self.private = tuple(
            name
            for name, module in self.parts.named_modules()
            if getattr(module, "stays_local", False) or isinstance(module, setup.method.keeps_layers)
        )
        """Paths inside shared parts that never leave a client: momentum encoders, queues, `keeps_layers`."""
        self.features = self._attached_features() if setup.cache_features else []
        """Features of frozen extractors, which steps may read."""

    def of(self, client: int) -> "Workspace":
        """Return the workspace for a client's network: this one, or that of another network; -1 means the server's."""
        return self.variants[self.setup.kind_of(client)]

    @cached_property
    def variants(self) -> list["Workspace"]:
        """The workspaces for all networks that clients have. Shared parts start from the same values in all of them."""
        others = [
            Workspace(setup, device=self.device, stored=self.stored, precision=self.precision)
            for setup in self.setup.variants[1:]
        ]
        for other in others:
            other.start_from({name: self.initial[name] for name in (*self._held, *self.sent)})
        return [self, *others]

    def _flattened(self, parts: Parts, name: str) -> FlatState:
        """Move all tensors of a tree but frozen ones into one buffer per dtype; the tensor objects stay the same."""
        tensors = {name: t for name, t in parts.in_tree_order().items() if not under(name, self.fixed)}
        layout = Layout.of(tensors)
        buffers = {dtype: self.allocate((name, dtype), (size,), dtype) for dtype, size in layout.sizes.items()}
        flat = FlatState(layout, buffers)
        copy_all_(list(flat.values()), list(tensors.values()))
        for name, view in flat.items():
            tensors[name].data = view
        return flat

    def _attached_features(self) -> list[Tensor]:
        """Let frozen extractors look up features, which the first workspace of a setup and precision computes."""
        known, place = self.setup.feature_caches, (self.device, self.precision)
        if place not in known:
            supervised = self.setup.task.objective.supervised
            with self.autocast():
                known[place] = compute_features(
                    self.parts, self.fixed, self.stored, self.evaluation_batch, supervised=supervised
                )
        return known[place].attach(self.stored, self.parts, self.received)

    def changing(self) -> State:
        """Return all tensors that are not frozen, without copying."""
        return {name: tensor for name, tensor in self.tensors.items() if name in self.flat}

    def start_from(self, values: Mapping[str, Tensor]) -> None:
        """Replace initial values. Those of frozen parts change in all workspaces of the setup."""
        fixed = [name for name in values if name in self.tensors and name not in self.flat]
        copy_all_([self.tensors[name] for name in fixed], [values[name] for name in fixed])
        self.initial |= {name: value for name, value in values.items() if name not in fixed}

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
        return max(EVALUATION_BATCH, EVALUATION_PIXELS // max(1, self.setup.task.dataset.area))

    def outgoing(self) -> FlatState:
        """Return the tensors that a client sends: a copy, or memory that an engine fills afterwards."""
        return self.flat.select(self.sent_layout) if self.outbox is None else self.outbox

    @cached_property
    def sent_layout(self) -> Layout:
        """Layout of the tensors that a client sends."""
        names = set(self._names(self.setup.method.up))
        return Layout.of({name: tensor for name, tensor in self.flat.items() if name in names})

    def downward(self) -> State:
        """Return the parts that the server holds, with their current values."""
        return self._copies(self._held)

    def unshared(self) -> State:
        """Return initial values of all tensors that the server does not hold, which inference needs."""
        held = set(self._held)
        return {name: value for name, value in self.initial.items() if name not in held}

    def kept(self) -> State:
        """Return the tensors that a client keeps between rounds."""
        return self._copies(self._kept)

    @property
    def _held(self) -> list[str]:
        return self._names((*self.setup.method.down, *self.setup.method.server_keeps))

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
            if isinstance(tensors, FlatState):
                missing = tensors.layout.missing(target.layout)
                target.take(tensors)
            else:
                missing = [name for name in target if name not in tensors]
                known = [name for name in tensors if name in target]
                copy_all_([target[name] for name in known], [tensors[name].expand_as(target[name]) for name in known])
            copy_all_(
                [target[name] for name in missing], [self.initial[name].expand_as(target[name]) for name in missing]
            )

    def parameters(self, paths: tuple[str, ...]) -> list[Tensor]:
        """Return the trainable tensors under some paths; cached, because every step calls it."""
        if paths not in self._parameters:
            for path in paths:
                self.parts.refuse_unknown(path, f"{self.setup.method.name}: fit, steps or descend of '{path}'")
            self._parameters[paths] = [p for name, p in self.parts.named_parameters() if under(name, paths)]
        return self._parameters[paths]

    def refuse_rebound(self) -> None:
        """Check that all tensors are at their original addresses; otherwise restore the tree and raise an error.

        Raises:
            CaptureError: Names the tensor that was replaced.
        """
        if (moved := self._addresses.moved()) is None:
            return
        self._addresses.restore(self.initial | dict(self.flat))
        raise CaptureError(f"part '{moved}' was rebound (p.data = … or an assignment); write in place instead: copy_")

    @cached_property
    def networks(self) -> list[Network]:
        """All networks in the tree."""
        return [module for module in self.parts.modules() if is_network(module)]

    def _networks_in(self, paths: tuple[str, ...]) -> list[Network]:
        """Return the networks that overlap with these paths."""
        return [
            module
            for name, module in self.parts.named_modules()
            if is_network(module) and (under(name, paths) or any(under(path, (name,)) for path in paths))
        ]

    def step_cache(self, site: Hashable, parts: tuple[str, ...], optimized: Iterable[tuple[str, ...]]) -> StepCache:
        """Return the statistics and optimizers of a call site, created on first use."""
        if site not in self.caches:
            names = self.setup.statistics.setdefault(site, {})
            groups = {paths: self.parameters(paths) for paths in optimized}
            settings = self.setup.training.optimizer
            self.caches[site] = StepCache(site, parts, self._networks_in(parts), groups, settings, self.allocate, names)
        return self.caches[site]
