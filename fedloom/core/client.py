"""One client at work: its parts, its samples, its memory, and ways to train. It does not know where it runs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Batch, FeatureBatch, Row, shuffled
from fedloom.core.fit import Features, FitResult, FitSpec, StaleValueError, code_of
from fedloom.core.optimizers import descend_
from fedloom.core.rng import Random, key, permutation
from fedloom.core.state import Parts, State, as_paths, copies
from fedloom.core.step_cache import StepCache
from fedloom.core.workspace import Steps, Workspace


class Client:
    """What a method's `update`, `personalise`, `predict` and losses get: parts by name (`client.model.head`)."""

    _workspace: Workspace
    _id: int
    _round: int
    _job: str
    _samples: np.ndarray
    _first: bool
    _optimizers: State
    _uses: dict[str, int]
    _step: "_Step"
    _loss: Tensor | None

    def __init__(
        self,
        workspace: Workspace,
        *,
        id: int,
        round: int,
        job: str,
        samples: np.ndarray,
        first: bool = False,
        optimizers: State | None = None,
    ):
        vars(self).update(  # past __setattr__: a client is made for every job
            _workspace=workspace, _id=id, _round=round, _job=job, _samples=samples, _first=first,
            _optimizers=dict(optimizers or {}), _uses={}, _step=_Step(), _loss=None,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._workspace.parts, name)
        except AttributeError:
            known = ", ".join(dict.fromkeys(n.split(".")[0] for n in self._workspace.parts.named_tensors()))
            raise AttributeError(f"no part is called '{name}'; build() made: {known}") from None

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"client.{name} = … would rebind a part: write in place, copy_(client.{name}, …)")
        super().__setattr__(name, value)

    @property
    def received(self) -> Any:
        """The parts as the server sent them: frozen, in eval mode."""
        return self._workspace.received

    @property
    def parts(self) -> Parts:
        """The whole tree."""
        return self._workspace.parts

    @property
    def id(self) -> int:
        """Which client this is."""
        return self._outside(self._id)

    @property
    def round(self) -> int:
        """The communication round, from 1."""
        return self._outside(self._round)

    @property
    def size(self) -> int:
        """Number of training samples."""
        return self._outside(len(self._samples))

    @property
    def first(self) -> bool:
        """Whether this client takes part for the first time."""
        return bool(self._outside(self._first))

    @property
    def lr(self) -> Tensor:
        """The learning rate in force, a 0-d tensor; inside a step only."""
        return self._inside("client.lr is known inside a step; after a fit read result.lr").lr

    @property
    def random(self) -> Random:
        """Random numbers of the current step; inside a step only: `client.random.uniform((8,))`."""
        self._inside("client.random is known inside a step")
        return self._workspace.random

    @property
    def last_loss(self) -> Tensor | None:
        """Mean training loss of the last fit."""
        return self._loss

    @property
    def optimizers(self) -> State:
        """State of optimizers that is carried over to the client's next round."""
        return self._optimizers

    @property
    def objective(self) -> Any:
        """What the recipe trains on, `objective(model, batch)`: cross-entropy with labels, or an unsupervised loss."""
        return self._workspace.setup.task.objective

    def fit(
        self,
        parts: str | tuple[str, ...],
        loss: Callable[..., Tensor],
        *,
        epochs: int | None = None,
        lr: float | None = None,
        views: int = 2,
        data: Features | None = None,
        batch_size: int | None = None,
        after: Callable[..., None] | None = None,
        keep_optimizer: bool = False,
        plain: bool = False,
        at_least: int = 0,
        purpose: str = "train",
    ) -> FitResult:
        """Minimises `loss(client, batch)` over these parts; everything else stays frozen.

        Args:
            parts: What is trained: `"model"`, or several paths.
            loss: A method of the method's class; its value is averaged if it has one entry per sample.
            epochs: Passes over the samples; the recipe's unless given, as `lr` and `batch_size`.
            lr: Learning rate.
            views: Augmented views per sample, for losses that read `batch.views`.
            data: Extracted features and labels to train on instead of images.
            batch_size: Samples per step.
            after: Called as `after(client)` after every optimizer step (an EMA target).
            plain: Bare gradient descent instead of the recipe's optimizer.
            keep_optimizer: Carry momentum and step count over to the client's next round.
            at_least: Least number of steps; a small client takes more epochs to reach it.
            purpose: Keys the randomness of this call.

        Returns:
            Means of what the loss noted, by name.
        """
        paths = as_paths(parts)

        def step(row: Row) -> None:
            with self._stepping(row, 1, views, data is not None) as (batch,):
                value = _mean(loss(self, batch))
                self.note("loss", value)
                self.descend(paths, value, plain=plain)
                if after is not None:
                    after(self)

        return self._run(
            FitSpec(
                step=step,
                site=("fit", paths, code_of(loss), after and code_of(after), views, data is not None, plain),
                parts=paths, optimized=(paths,), epochs=epochs, lr=lr, batch_size=batch_size, purpose=purpose,
                data=data, at_least=at_least, keep_as=loss.__name__ if keep_optimizer or self._keeps else None,
            )
        )  # fmt: skip

    def steps(
        self,
        step: Callable[..., None],
        *,
        train: str | tuple[str, ...],
        epochs: int | None = None,
        lr: float | None = None,
        views: int = 2,
        batches: int = 1,
        fraction: float = 1.0,
        batch_size: int | None = None,
        purpose: str = "train",
    ) -> FitResult:
        """Calls `step(client, batch, …)`, in-place tensor code of the method's own, for every batch.

        Args:
            step: A method of the method's class.
            train: Parts that are in train mode and that `descend` may step.
            batches: Independent batches per step.
            fraction: Share of the samples, drawn for this call.
            epochs, lr, views, batch_size, purpose: As in `fit`.
        """
        paths = as_paths(train)

        def taken(row: Row) -> None:
            with self._stepping(row, batches, views, features=False) as drawn:
                step(self, *drawn)

        return self._run(
            FitSpec(
                step=taken, site=("steps", paths, code_of(step), views, batches), parts=paths,
                optimized=tuple((path,) for path in paths), epochs=epochs, lr=lr, batch_size=batch_size,
                purpose=purpose, batches=batches, fraction=fraction, keep_as=step.__name__ if self._keeps else None,
            )
        )  # fmt: skip

    def descend(
        self, parts: str | tuple[str, ...], loss: Tensor, *, lr: float | None = None, plain: bool = False
    ) -> None:
        """One optimizer step of these parts on this loss; `plain` is bare gradient descent without momentum."""
        cache = self._inside("descend is called inside a step")
        paths = as_paths(parts)
        parameters = self._workspace.parameters(paths)
        gradients = torch.autograd.grad(_mean(loss), parameters, allow_unused=True)
        rate = cache.lr if lr is None else lr
        if plain:
            used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
            descend_([p for p, _ in used], [g for _, g in used], rate)
        else:
            cache.optimizers[paths].step(gradients, rate)

    def note(self, name: str, value: Tensor) -> None:
        """Adds to a statistic of this fit: `result[name]` is its sample-weighted mean."""
        total = self._inside("note is called inside a step").total(name)
        total.add_(_mean(value.detach()), alpha=self._step.size)

    def features(self, extract: Callable[..., Tensor] | None = None) -> Features:
        """Representations and labels of all training samples, in eval mode; `extract(client, x)` or the extractor."""
        extract = extract or (lambda client, x: client.model.extractor(x))
        workspace = self._workspace
        index = torch.from_numpy(self._samples).to(workspace.device)
        workspace.evaluate_only()
        with torch.no_grad(), workspace.autocast():
            chunks = index.split(workspace.evaluation_batch)
            z = torch.cat([extract(self, workspace.pixels.plain(i)).float() for i in chunks])
            return z, workspace.pixels.labels[index]

    @property
    def _keeps(self) -> bool:
        """Whether the recipe carries all optimizers' state over to the next round."""
        return self._workspace.setup.training.optimizer.keep

    def _outside(self, value: int) -> int:
        if self._step.active:
            raise StaleValueError(
                "client.id, round, size and first are Python values: a recorded step would keep the first client's. "
                "Put what changes into a part (a tensor) before the fit"
            )
        return value

    def _inside(self, otherwise: str) -> StepCache:
        cache = self._step.cache
        assert cache is not None, otherwise
        return cache

    @contextmanager
    def _stepping(self, row: Row, batches: int, views: int, features: bool) -> Iterator[list[Any]]:
        """One training step: its batches, under the workspace's precision; then the objective's own bookkeeping."""
        workspace, step = self._workspace, self._step
        cache = self._inside("a step has a cache")
        workspace.random.begin(row[:1])
        indices = row[1:].view(batches, -1).unbind()
        step.active = True
        try:
            with workspace.autocast():
                drawn: list[Any]
                if features:
                    assert cache.data is not None
                    drawn = [FeatureBatch(cache.data, i) for i in indices]
                else:
                    drawn = [Batch(workspace.pixels, i, workspace.random, views) for i in indices]
                step.size = sum(batch.size for batch in drawn)
                yield drawn
                for model in workspace.networks_in(cache.parts):
                    workspace.setup.task.objective.follow(model)
        finally:
            step.active = False

    def _run(self, spec: FitSpec) -> FitResult:
        """Takes the steps of a fit: keys the randomness, readies optimizers and modes, plans the batches."""
        if self._step.active:
            raise RuntimeError("a step calls fit or steps, which no recorded step can hold: call descend inside it")
        workspace, training = self._workspace, self._workspace.setup.training
        epochs = training.epochs if spec.epochs is None else spec.epochs
        size = spec.batch_size or training.batch_size
        use = self._uses.get(spec.purpose, 0)
        self._uses[spec.purpose] = use + (epochs > 0)
        seed = key(workspace.setup.seed, self._round, self._id, self._job, spec.purpose, use)

        cache = self._step.cache = workspace.step_cache(spec.site, spec.parts, spec.optimized)
        lr = training.lr(max(1, self._round)) if spec.lr is None else spec.lr
        index = self._samples
        if spec.data is not None:
            index = np.arange(len(spec.data[0]))
            cache.hold(spec.data, workspace.setup.task.largest_client if workspace.stepper.fixed_memory else None)
        if spec.fraction < 1:
            index = index[permutation(key(seed, "some"), len(index))[: max(1, int(spec.fraction * len(index)))]]
        if epochs and len(index):
            epochs = max(epochs, math.ceil(spec.at_least / math.ceil(len(index) / size)))
        plan = shuffled(index, size, seed, epochs=epochs, batches=spec.batches)
        workspace.expect_mode(spec.parts, norms=plan.norms)
        steps = Steps(workspace, cache, spec.step, plan, lr, self._optimizers, spec.keep_as)
        means = workspace.stepper.run(steps)
        if spec.keep_as:
            self._optimizers |= copies(cache.optimizer_state(spec.keep_as))
        self._loss = means.get("loss", self._loss)
        return FitResult(means, len(plan.sizes), workspace.constant(lr))


class _Step:
    """What a client knows inside a step: the call's statistics and optimizers, the samples of the step."""

    __slots__ = ("active", "cache", "size")

    def __init__(self) -> None:
        self.active, self.size = False, 0
        self.cache: StepCache | None = None


def _mean(value: Tensor) -> Tensor:
    return value if value.dim() == 0 else value.mean()
