"""The configuration that all workspaces of an experiment share: task, method, training, wire format."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fedloom.core.compression import Codec, WireSettings
from fedloom.core.errors import UserError
from fedloom.core.features import FeatureCaches
from fedloom.core.frozen import FrozenTensors
from fedloom.core.message import Signature, signature
from fedloom.core.metrics import Metric
from fedloom.core.protocols import MethodLike
from fedloom.core.rng import key
from fedloom.core.state import Parts
from fedloom.core.task import Task
from fedloom.core.training import Training
from fedloom.core.trigger import Trigger


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
    trigger: Trigger | None = None
    """Trigger of a simulated backdoor attack, whose success evaluations measure."""
    cache_features: bool = False
    """Whether workspaces compute the features of a frozen extractor once, for all samples (see core/features.py)."""

    @cached_property
    def variants(self) -> tuple["Setup", ...]:
        """Setups of the networks that clients have; the first, which is also the server's, is this one."""
        others = self.task.network.kinds[1:]
        return (self, *(replace(self, task=replace(self.task, network=network)) for network in others))

    def kind_of(self, client: int) -> int:
        """Return the position of a client's network in `variants`; -1 means the server's."""
        return 0 if client < 0 else self.task.network.kind_of(client)

    def of(self, client: int) -> "Setup":
        """Return the setup of a client's network; -1 means the server's."""
        return self.variants[self.kind_of(client)]

    @cached_property
    def shapes(self) -> Signature:
        """Names, dtypes and shapes of the parts."""
        return signature(self.build().named_tensors())

    def shapes_of(self, client: int) -> Signature:
        """Return `shapes` of a client's network; empty if the client does not exist."""
        return self.of(client).shapes if client < self.task.clients else {}

    @cached_property
    def frozen_tensors(self) -> FrozenTensors:
        """Frozen tensors, which all workspaces of a process share; forked processes share them, too."""
        return {}

    @cached_property
    def feature_caches(self) -> FeatureCaches:
        """Features of frozen extractors, which all workspaces of a process share."""
        return {}

    @cached_property
    def statistics(self) -> dict[Hashable, dict[str, int]]:
        """Positions of statistics by call site. Equal in all workspaces, because they share recorded steps."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Omit what every worker process creates separately: positions of statistics, variants, and shared memory."""
        separate = ("statistics", "variants", "frozen_tensors", "feature_caches")
        return {name: value for name, value in vars(self).items() if name not in separate}

    @cached_property
    def codec(self) -> Codec:
        """Encodes and decodes messages."""
        return Codec(self.wire, exact=(*self.method.by.values(), *self.method.sums))

    def build(self) -> Parts:
        """Return the method's parts with their initial values; built on the CPU, so that devices do not differ."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "init"))
            parts = Parts(self.method.build(self.task))
        self._refuse_unknown_parts(parts)
        return parts

    def _refuse_unknown_parts(self, parts: Parts) -> None:
        """Raise a UserError if a class attribute of the method names a part that `build` does not return."""
        method = self.method
        for attribute in ("shares", "sends", "receives", "keeps", "serves", "sums"):
            paths = getattr(method, attribute, None) or ()
            if isinstance(paths, str):
                raise UserError(f"{method.name}.{attribute} = '{paths}': must be a tuple of parts: (\"{paths}\",)")
            for path in paths:
                parts.refuse_unknown(path, f"{method.name}.{attribute} = {tuple(paths)!r}")
        for part, weight in method.by.items():
            for path in (part, weight):
                parts.refuse_unknown(path, f"{method.name}.by = {dict(method.by)!r}")


@dataclass(frozen=True)
class Precision:
    """Number format and memory layout of network computations."""

    bf16: bool = False
    channels_last: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Memory layout of images and convolutions."""
        return torch.channels_last if self.channels_last else torch.contiguous_format
