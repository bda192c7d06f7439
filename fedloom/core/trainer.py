"""Training steps of a client: plans the steps of every `fit`, lets the workspace take them, and sets up each step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.core.batches import Batch, FeatureBatch, Plan, Row, shuffled
from fedloom.core.fit import FitResult, FitSpec
from fedloom.core.rng import key, permutation
from fedloom.core.state import State, copies
from fedloom.core.step_cache import FINITE_STEPS, StepCache
from fedloom.core.workspace import Steps, Workspace


class Trainer:
    """Trains one client during a job."""

    def __init__(self, workspace: Workspace, id: int, round: int, job: str, samples: np.ndarray, optimizers: State):
        self.workspace, self.id, self.round, self.samples = workspace, id, round, samples
        self.optimizers = optimizers
        """Optimizer state that is kept for the client's next round."""
        self.loss: Tensor | None = None
        """Mean loss of the last call; None before the first one."""
        self.finite: tuple[Tensor, int] | None = None
        """Two factors of the number of steps of the last call before its loss was no longer finite."""
        self.cache: StepCache | None = None
        """Statistics and optimizers of the last call."""
        self.active = False
        """Whether a step is being taken."""
        self.step_size = 0
        """Number of samples of the current step."""
        self._job = job
        self._uses: dict[str, int] = {}
        """Number of earlier calls by purpose."""

    def run(self, spec: FitSpec) -> FitResult:
        """Take the steps of one call of `fit` or `steps`.

        Raises:
            RuntimeError: Called inside a training step.
        """
        if self.active:
            raise RuntimeError(
                "fit and steps cannot be called inside a training step, which may be recorded; call client.descend"
            )
        workspace, training = self.workspace, self.workspace.setup.training
        cache = self.cache = workspace.step_cache(spec.site, spec.parts, spec.optimized)
        if spec.data is not None:
            cache.hold(spec.data, workspace.setup.task.largest_client if workspace.stepper.fixed_memory else None)
        lr = training.lr(max(1, self.round)) if spec.lr is None else spec.lr
        plan, keep_as = self._plan(spec), spec.name if spec.keep or training.optimizer.keep else None
        means = workspace.stepper.run(Steps(workspace, cache, spec.step, plan, lr, self.optimizers, keep_as))
        if (finite := means.pop(FINITE_STEPS, None)) is not None:
            self.finite = finite, plan.samples
        if keep_as:
            self.optimizers |= copies(cache.optimizer_state(keep_as))
        self.loss = means.get("loss", self.loss)
        return FitResult(means, len(plan.sizes), lr, workspace.device)

    def _plan(self, spec: FitSpec) -> Plan:
        """Choose the samples of every step; their order follows from the client, the round and the purpose."""
        workspace, training = self.workspace, self.workspace.setup.training
        epochs = training.epochs if spec.epochs is None else spec.epochs
        if workspace.fixed and not any(workspace.parameters(paths) for paths in spec.optimized):
            epochs = 0  # all parts are frozen by the recipe
        use = self._uses.get(spec.purpose, 0)
        self._uses[spec.purpose] = use + (epochs > 0)
        seed = key(workspace.setup.seed, self.round, self.id, self._job, spec.purpose, use)
        among = self.samples if spec.data is None else np.arange(len(spec.data[0]))
        if spec.fraction < 1:
            among = among[permutation(key(seed, "some"), len(among))[: max(1, int(spec.fraction * len(among)))]]
        size = spec.batch_size or training.batch_size
        if epochs and len(among):
            epochs = max(epochs, math.ceil(spec.at_least / math.ceil(len(among) / size)))
        return shuffled(among, size, seed, epochs=epochs, batches=spec.batches)

    @contextmanager
    def step(self, row: Row, *, batches: int = 1, views: int, features: bool = False) -> Iterator[list[Any]]:
        """Set up one step and yield its batches; afterwards let the objective update its internal state."""
        workspace, cache = self.workspace, self.cache
        assert cache is not None
        workspace.random.begin(row[:1])
        indices = row[1:].view(batches, -1).unbind()
        self.active = True
        try:
            with workspace.autocast():
                drawn: list[Any]
                if features:
                    assert cache.data is not None
                    drawn = [FeatureBatch(cache.data, i) for i in indices]
                else:
                    drawn = [Batch(workspace.stored, i, workspace.random, views) for i in indices]
                self.step_size = sum(batch.size for batch in drawn)
                yield drawn
                for network in cache.networks:
                    workspace.setup.task.objective.follow(network)
        finally:
            self.active = False
