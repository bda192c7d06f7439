"""What a client and the server have in common: parts to work on, and ways to train them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.batch import Batch, FeatureBatch
from fedloom.lane import Lane, Site
from fedloom.optimizers import descend_
from fedloom.parts import Parts, State, as_paths
from fedloom.plan import Indices, shuffled
from fedloom.randomness import key, numpy_generator

Features = tuple[Tensor, Tensor]


class StaleValueError(RuntimeError):
    """A step reads a Python value that a recorded step would keep from its first client."""


class Told(dict[str, Tensor]):
    """What a fit tells: sample-weighted means of what the loss noted (`loss` always), steps taken, learning rate."""

    def __init__(self, means: State, steps: int, lr: Tensor):
        super().__init__(means)
        self.steps = steps
        self.lr = lr


class Worker:
    """Parts by name (`worker.model.head`), and `fit` and `steps` to train them on this worker's samples."""

    def __init__(self, lane: Lane, *, who: int, round: int, job: str, samples: np.ndarray, kept: State | None = None):
        self._lane = lane
        self._who, self._round, self._job, self._samples = who, round, job, samples
        self._kept: State = kept or {}
        self._uses: dict[str, int] = {}
        self._inside = False
        self._site: Site | None = None
        self._batch_size = 0
        self._loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._lane.parts, name)
        except AttributeError:
            known = ", ".join(dict.fromkeys(n.split(".")[0] for n in self._lane.parts.named_tensors()))
            raise AttributeError(f"no part is called '{name}'; build() made: {known}") from None

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"client.{name} = … would rebind a part: write in place, copy_(client.{name}, …)")
        super().__setattr__(name, value)

    @property
    def received(self) -> Any:
        """The parts as the server sent them: frozen, in eval mode."""
        return self._lane.received

    @property
    def parts(self) -> Parts:
        """The whole tree."""
        return self._lane.parts

    @property
    def id(self) -> int:
        """Which client this is."""
        return self._plain(self._who)

    @property
    def round(self) -> int:
        """The communication round, from 1."""
        return self._plain(self._round)

    @property
    def size(self) -> int:
        """How many training samples it has."""
        return self._plain(len(self._samples))

    @property
    def lr(self) -> Tensor:
        """The learning rate in force, a 0-d tensor; inside a step only."""
        assert self._site is not None, "client.lr is known inside a step; after a fit read told.lr"
        return self._site.lr

    @property
    def last_loss(self) -> Tensor | None:
        """Mean training loss of the last fit."""
        return self._loss

    @property
    def objective(self) -> Any:
        """What the recipe trains on, `objective(model, batch)`: cross-entropy with labels, or an unsupervised loss."""
        return self._lane.setup.task.objective

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
        at_least: int = 0,
        purpose: str = "train",
    ) -> Told:
        """Minimises `loss(client, batch)` over these parts; everything else stays frozen.

        Epochs, learning rate and batch size are the recipe's unless given. `data` trains on extracted features instead
        of images; `after(client)` runs after every optimizer step (an EMA target); `keep_optimizer` carries momentum
        over to the client's next round; `at_least` so many steps are taken, in more epochs if need be (a small client).
        """
        paths = as_paths(parts)

        def step(batch: Batch) -> None:
            value = _mean(loss(self, batch))
            self.note("loss", value)
            self.descend(paths, value)
            if after is not None:
                after(self)

        where = ("fit", paths, _code(loss), after and _code(after), views, data is not None)
        kept = loss.__name__ if keep_optimizer or self._keeps_optimizers else None
        return self._train(
            step, where, paths, [paths], epochs, lr, batch_size, purpose, views, data=data, kept=kept, at_least=at_least
        )

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
    ) -> Told:
        """Calls `step(client, batch, …)`, in-place tensor code of its own, for every batch.

        `train` names the parts that are in train mode and that `descend` may step; `batches` is how many independent
        batches a step gets; `fraction` draws that share of the samples anew for this call.
        """
        paths = as_paths(train)
        where = ("steps", paths, _code(step), views, batches)

        def bound(*drawn: Batch) -> None:
            step(self, *drawn)

        each = [(path,) for path in paths]
        return self._train(
            bound,
            where,
            paths,
            each,
            epochs,
            lr,
            batch_size,
            purpose,
            views,
            batches=batches,
            fraction=fraction,
            kept=step.__name__ if self._keeps_optimizers else None,
        )

    def descend(
        self, parts: str | tuple[str, ...], loss: Tensor, *, lr: float | None = None, plain: bool = False
    ) -> None:
        """One optimizer step of these parts on this loss; `plain` is bare gradient descent without momentum."""
        assert self._site is not None, "descend is called inside a step"
        paths = as_paths(parts)
        parameters = self._lane.parameters(paths)
        gradients = torch.autograd.grad(_mean(loss), parameters, allow_unused=True)
        rate = self._site.lr if lr is None else lr
        if plain:
            used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
            descend_([p for p, _ in used], [g for _, g in used], rate)
        else:
            self._site.optimizers[paths].step(gradients, rate)

    def note(self, name: str, value: Tensor) -> None:
        """Adds to a statistic of this fit: `told[name]` is its sample-weighted mean."""
        assert self._site is not None, "note is called inside a step"
        total = self._site.sums.setdefault(name, torch.zeros_like(self._site.lr))
        total.add_(_mean(value.detach()), alpha=self._batch_size)

    def features(self, extract: Callable[..., Tensor] | None = None) -> Features:
        """Representations and labels of all training samples, in eval mode; `extract(client, x)` or the extractor."""
        extract = extract or _extractor
        lane = self._lane
        index = torch.from_numpy(self._samples).to(lane.device)
        lane.parts.eval()
        with torch.no_grad(), lane.arithmetic():
            z = torch.cat([extract(self, lane.pixels.plain(i)).float() for i in index.split(lane.evaluation_batch)])
            return z, lane.pixels.labels[index]

    @property
    def _keeps_optimizers(self) -> bool:
        return self._lane.setup.training.optimizer.keep

    def _plain(self, value: int) -> int:
        if self._inside:
            raise StaleValueError(
                "client.id, round, size and first are Python values: a recorded step would keep the first client's. "
                "Put what changes into a part (a tensor) before the fit"
            )
        return value

    def _train(
        self,
        step: Callable[..., None],
        where: tuple[Any, ...],
        paths: tuple[str, ...],
        optimized: Sequence[tuple[str, ...]],
        epochs: int | None,
        lr: float | None,
        batch_size: int | None,
        purpose: str,
        views: int,
        *,
        data: Features | None = None,
        batches: int = 1,
        fraction: float = 1.0,
        kept: str | None = None,
        at_least: int = 0,
    ) -> Told:
        if self._inside:
            raise RuntimeError("a step calls fit or steps, which no recorded step can hold: call descend inside it")
        lane, training = self._lane, self._lane.setup.training
        epochs = training.epochs if epochs is None else epochs
        size = batch_size or training.batch_size
        use = self._uses.get(purpose, 0)
        self._uses[purpose] = use + (epochs > 0)
        seed = (lane.setup.seed, self._round, self._who, self._job, purpose, use)
        lane.generator.manual_seed(key(*seed))
        order = numpy_generator(*seed, "order")

        site = self._site = lane.site((type(self).__name__, *where), optimized)
        rate = site.set_lr(training.lr(max(1, self._round)) if lr is None else lr)
        if kept:
            self._restore(site, kept)
        index = self._samples
        if data is not None:
            index = np.arange(len(data[0]))
            if lane.stepper.fixed_memory:
                site.hold(data, lane.setup.task.largest_client)
                data = site.data
        if fraction < 1:
            index = index[order.permutation(len(index))[: max(1, int(fraction * len(index)))]]
        if epochs and len(index):
            epochs = max(epochs, math.ceil(at_least / math.ceil(len(index) / size)))
        plan = shuffled(index, size, order, epochs=epochs, batches=batches)
        lane.train_only(paths, norms=min(size, len(index)) > 1)
        objective = lane.setup.task.objective
        followed = lane.networks_in(paths)

        def take(indices: Indices) -> None:
            self._inside = True
            try:
                with lane.arithmetic():
                    drawn: list[Any] = [
                        Batch(lane.pixels, i, lane.generator, views) if data is None else FeatureBatch(data, i)
                        for i in indices
                    ]
                    self._batch_size = sum(batch.size for batch in drawn)
                    step(*drawn)
                    for model in followed:
                        objective.follow(model)
            finally:
                self._inside = False

        lane.stepper.run(lane, site, take, plan)
        if kept:
            self._remember(site, kept)
        # without a step nothing is told, whatever an earlier client noted at this site
        means = {name: total / plan.samples for name, total in site.sums.items()} if plan.sizes else {}
        self._loss = means.get("loss", self._loss)
        return Told(means, len(plan.sizes), rate)

    def _restore(self, site: Site, name: str) -> None:
        for path, tensor in _optimizer_state(site, name):
            if path in self._kept:
                tensor.copy_(self._kept[path])

    def _remember(self, site: Site, name: str) -> None:
        self._kept |= {path: tensor.clone() for path, tensor in _optimizer_state(site, name)}


def _optimizer_state(site: Site, name: str) -> list[tuple[str, Tensor]]:
    return [
        (f"optim.{name}.{'+'.join(paths)}.{i}", tensor)
        for paths, optimizer in site.optimizers.items()
        for i, tensor in enumerate(optimizer.state())
    ]


def _mean(value: Tensor) -> Tensor:
    return value if value.dim() == 0 else value.mean()


def _extractor(client: Worker, x: Tensor) -> Tensor:
    z: Tensor = client.model.extractor(x)
    return z


def _code(function: Callable[..., Any]) -> Any:
    """What identifies a call site. Functions that close over values are refused: a recorded step would keep them."""
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None:
        raise StaleValueError(f"{function!r} is no plain function or method: losses and steps must be")
    free = set(code.co_freevars) - {"__class__"}
    if free:
        raise StaleValueError(
            f"{plain.__qualname__} closes over {', '.join(sorted(free))}: a recorded step would keep the first "
            "client's value. Make it a method, and what changes a part"
        )
    return code
