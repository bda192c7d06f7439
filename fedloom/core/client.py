"""One client during a job: its parts, its samples, its memory, and the functions that train it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedloom.core.batches import Row
from fedloom.core.errors import UserError
from fedloom.core.fit import Features, FitResult, FitSpec, StaleValueError, code_of
from fedloom.core.optimizers import descend_
from fedloom.core.rng import Random
from fedloom.core.state import Parts, State, as_paths
from fedloom.core.step_cache import FINITE_STEPS, StepCache
from fedloom.core.trainer import Trainer
from fedloom.core.workspace import Workspace


class Client:
    """A client, as passed to a method's `update`, `personalise`, `predict` and to losses.

    The parts that `build` returned are attributes: `client.model.head`. They are changed in place only, because their
    memory is reused for every client. The same code runs on every engine: a client has no access to devices, processes
    or other clients.

    Example:
        >>> def update(self, client):
        ...     copy_(client.model.head, client.received.model.head)
        ...     client.fit("model", self.loss)
    """

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
        self._workspace, self._first = workspace, first
        self._trainer = Trainer(workspace, id, round, job, samples, dict(optimizers or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._workspace.parts, name)
        except AttributeError:
            known = ", ".join(dict.fromkeys(n.split(".")[0] for n in self._workspace.parts.named_tensors()))
            raise AttributeError(f"client.{name}: there is no such part; build() returned: {known}") from None

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(
                f"client.{name} = … would rebind a part; write in place instead: copy_(client.{name}, …)"
            )
        super().__setattr__(name, value)

    @property
    def received(self) -> Any:
        """The shared parts as the server sent them: frozen and in eval mode."""
        return self._workspace.received

    @property
    def parts(self) -> Parts:
        """All parts as one module tree."""
        return self._workspace.parts

    @property
    def id(self) -> int:
        """The client's number. Not available inside a step."""
        return self._outside(self._trainer.id)

    @property
    def round(self) -> int:
        """The communication round, counted from 1. Not available inside a step."""
        return self._outside(self._trainer.round)

    @property
    def size(self) -> int:
        """Number of training samples. Not available inside a step."""
        return self._outside(len(self._trainer.samples))

    @property
    def first(self) -> bool:
        """Whether the client takes part for the first time. Not available inside a step."""
        return bool(self._outside(self._first))

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class, a float tensor [classes]. Not available inside a step.

        A loss that needs the counts reads them from a part: `copy_(client.counts, client.class_counts)`.
        """
        self._outside(0)
        workspace = self._workspace
        labels = workspace.stored.labels[torch.from_numpy(self._trainer.samples).to(workspace.device)]
        return one_hot(labels, workspace.setup.task.classes).sum(0).float()

    @property
    def lr(self) -> Tensor:
        """The current learning rate, a 0-d tensor. Available inside a step only."""
        return self._inside("client.lr is available inside a training step only; after a fit read result.lr").lr

    @property
    def random(self) -> Random:
        """Random numbers of the current step, such as `client.random.uniform((8,))`. Available inside a step only."""
        self._inside("client.random is available inside a training step only")
        return self._workspace.random

    @property
    def last_loss(self) -> Tensor | None:
        """Mean training loss of the last `fit`, or None before the first one."""
        return self._trainer.loss

    @property
    def finite_steps(self) -> tuple[Tensor, int] | None:
        """Two factors of the number of steps of the last `fit` before its loss was no longer finite; None before it."""
        return self._trainer.finite

    @property
    def optimizers(self) -> State:
        """Optimizer state that is stored until the client's next round."""
        return self._trainer.optimizers

    @property
    def objective(self) -> Any:
        """The objective of the recipe, called as `objective(model, batch)`: cross-entropy or an unsupervised loss."""
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
        """Train parts by minimising `loss(client, batch)`. All other parts stay frozen.

        Args:
            parts: The parts to train, such as `"model"` or `("model.extractor", "gate")`.
            loss: A method of the `Method` class. Losses with one entry per sample are averaged.
            epochs: Passes over the samples. Default: `training.epochs` of the recipe.
            lr: Learning rate. Default: the recipe's, including its schedule.
            views: Number of augmented views per sample, for losses that read `batch.views`.
            data: Extracted features and labels to train on instead of images, as returned by `features`.
            batch_size: Samples per step. Default: `training.batch_size` of the recipe.
            after: Called as `after(client)` after every optimizer step, for instance to update an EMA target.
            keep_optimizer: Keep momentum and step count for the client's next round.
            plain: Use gradient descent without momentum, weight decay or clipping instead of the recipe's optimizer.
            at_least: Minimum number of steps. A small client trains for more epochs to reach it.
            purpose: Key of the random numbers of this call, together with seed, round and client.

        Returns:
            The sample-weighted mean of the loss (`result["loss"]`) and of everything passed to `note`.

        Raises:
            StaleValueError: `loss` or `after` is a closure.
            RuntimeError: Called inside a training step.

        Example:
            >>> result = client.fit("model.head", self.loss, epochs=1, lr=0.1)
            >>> result["loss"], result.steps
        """
        paths = as_paths(parts)

        def step(row: Row) -> None:
            with self._trainer.step(row, views=views, features=data is not None) as (batch,):
                value = _mean(loss(self, batch), batch.size)
                self.note("loss", value)
                self.descend(paths, value, plain=plain)
                if after is not None:
                    after(self)

        return self._trainer.run(
            FitSpec(
                step=step,
                site=("fit", paths, code_of(loss), after and code_of(after), views, data is not None, plain),
                parts=paths, optimized=(paths,), name=loss.__name__, epochs=epochs, lr=lr, batch_size=batch_size,
                purpose=purpose, data=data, at_least=at_least, keep=keep_optimizer,
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
        """Call `step(client, batch, …)` once per batch. The step changes parts in place, usually with `descend`.

        Args:
            step: A method of the `Method` class, which receives the client and `batches` batches.
            train: Parts that are in train mode and that `descend` may update, each with a separate optimizer.
            epochs: Passes over the samples. Default: `training.epochs` of the recipe.
            lr: Learning rate. Default: the recipe's, including its schedule.
            views: Number of augmented views per sample, for steps that read `batch.views`.
            batches: Number of independent batches per step.
            fraction: Share of the samples to use, drawn at random for this call.
            batch_size: Samples per batch. Default: `training.batch_size` of the recipe.
            purpose: Key of the random numbers of this call, together with seed, round and client.

        Returns:
            The sample-weighted means of everything passed to `note`.

        Raises:
            StaleValueError: `step` is a closure.
            RuntimeError: Called inside a training step.

        Example:
            >>> def step(self, client, batch):
            ...     loss = self.loss(client, batch)
            ...     client.note("loss", loss)
            ...     client.descend("model", loss)
            >>> client.steps(self.step, train="model")
        """
        paths = as_paths(train)

        def taken(row: Row) -> None:
            with self._trainer.step(row, batches=batches, views=views) as drawn:
                step(self, *drawn)

        return self._trainer.run(
            FitSpec(
                step=taken, site=("steps", paths, code_of(step), views, batches), parts=paths,
                optimized=tuple((path,) for path in paths), name=step.__name__, epochs=epochs, lr=lr,
                batch_size=batch_size, purpose=purpose, batches=batches, fraction=fraction,
            )
        )  # fmt: skip

    def descend(
        self, parts: str | tuple[str, ...], loss: Tensor, *, lr: float | None = None, plain: bool = False
    ) -> None:
        """Take one optimizer step on `loss` with respect to `parts`. For use inside a step of `steps`.

        Args:
            parts: The parts to update; one of the paths passed to `steps(train=…)`.
            loss: The loss. Losses with one entry per sample are averaged.
            lr: Learning rate. Default: that of the enclosing call.
            plain: Use gradient descent without momentum, weight decay or clipping instead of the recipe's optimizer.
        """
        cache = self._inside("client.descend can be called inside a training step only")
        paths = as_paths(parts)
        parameters = self._workspace.parameters(paths)
        if not parameters:  # frozen by the recipe
            return
        try:
            gradients = torch.autograd.grad(_mean(loss), parameters, allow_unused=True)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise UserError(f"the loss does not depend on {', '.join(paths)} (detach, no_grad?)") from None
            raise
        rate = cache.lr if lr is None else lr
        if plain:
            used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
            with torch.no_grad():
                descend_([p for p, _ in used], [g for _, g in used], rate)
        else:
            cache.optimizers[paths].step(gradients, rate)

    def note(self, name: str, value: Tensor) -> None:
        """Add a value to a statistic of the enclosing `fit` or `steps`. For use inside a step.

        Args:
            name: Name of the statistic: `result[name]` is its sample-weighted mean.
            value: A scalar, or one entry per sample.

        Raises:
            UserError: The call has more than 32 statistics.
        """
        cache = self._inside("client.note can be called inside a training step only")
        total, value = cache.total(name), value.detach()
        total.add_(value if value.dim() == 0 else value.mean(), alpha=self._trainer.step_size)
        if name == "loss":
            cache.total(FINITE_STEPS).add_(total.isfinite())

    def features(self, extract: Callable[..., Tensor] | None = None) -> Features:
        """Extract representations of all training samples, in eval mode and without gradients.

        Args:
            extract: Called as `extract(client, x)`. Default: `client.model.extractor(x)`.

        Returns:
            Representations [N, k] in float32 and labels [N].

        Example:
            >>> z, y = client.features()
            >>> client.fit("model.head", self.head_loss, data=(z, y))
        """
        extract = extract or (lambda client, x: client.model.extractor(x))
        workspace = self._workspace
        index = torch.from_numpy(self._trainer.samples).to(workspace.device)
        workspace.modes.evaluate_only()
        with torch.no_grad(), workspace.autocast():
            chunks = index.split(workspace.evaluation_batch)
            z = torch.cat([extract(self, workspace.stored.plain(i)).float() for i in chunks])
            return z, workspace.stored.labels[index]

    def _outside(self, value: int) -> int:
        if self._trainer.active:
            raise StaleValueError(
                "client.id, round, size, first and class_counts cannot be read inside a training step: a recorded step "
                "would reuse the first client's. Copy the value into a part (a tensor) before the fit"
            )
        return value

    def _inside(self, message: str) -> StepCache:
        cache = self._trainer.cache
        assert cache is not None, message
        return cache


def _mean(value: Tensor, size: int = 1) -> Tensor:
    """Return a scalar, or the mean of a vector whose length is a multiple of the number of samples.

    Raises:
        UserError: The value is neither.
    """
    if not isinstance(value, Tensor):
        raise UserError(f"a loss returned a {type(value).__name__}; it must return a tensor")
    if value.dim() > 1 or not value.is_floating_point() or (value.dim() == 1 and (not len(value) or len(value) % size)):
        raise UserError(
            f"a loss returned a {value.dtype} tensor of shape {list(value.shape)}; it must return a floating-point "
            "scalar, or one entry per sample"
        )
    return value if value.dim() == 0 else value.mean()
