"""Evaluation of a run's models on newcomers: clients that did not take part in training.

Compares heads on the frozen representation (RepPer, Fig. 6; also on another dataset with other classes), the global
model without changes (FedCRC, Table II), and training alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import methods, objectives
from fedloom.core.errors import UserError
from fedloom.core.execution import perform
from fedloom.core.job import Job
from fedloom.core.message import Message
from fedloom.core.rng import numpy_generator
from fedloom.core.setup import Setup
from fedloom.core.task import Task
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.data import Dataset, federate, limit, load
from fedloom.data.augment import parse_augment
from fedloom.data.dataset import resize
from fedloom.inference.adapt import STEPS, HeadFitter
from fedloom.inference.image_model import chunks
from fedloom.inference.trained_model import AVERAGED, TrainedModel, factory_of
from fedloom.inference.trained_run import TrainedRun
from fedloom.methods.addons.heads import Head

Record = dict[str, Any]
GLOBAL, ALONE = "global", "alone"
"""Keys of results: the global model, and a model that the newcomer trains alone."""
AVERAGE = "average of the clients' models"


@dataclass(frozen=True)
class NewcomerData:
    """Newcomers and their samples: the run's held-out clients, or clients of another dataset."""

    task: Task
    clients: tuple[int, ...]
    own: bool
    """Whether the classes are the run's, so that its classifiers apply."""

    def with_labelled(self, count: int, seed: int) -> "NewcomerData":
        """Return the same newcomers with at most `count` labelled training samples each, drawn by client and seed.

        The samples of a smaller count are among those of a larger one.
        """
        train = list(self.task.federation.train)
        for client in self.clients:
            order = numpy_generator(seed, "labelled", client).permutation(len(train[client]))
            train[client] = np.sort(train[client][order[:count]])
        return replace(self, task=replace(self.task, federation=replace(self.task.federation, train=train)))


def held_out(run: TrainedRun) -> NewcomerData:
    """Return the clients that `data.newcomers` held out of training.

    Raises:
        UserError: The run held out no clients.
    """
    if not run.facts["newcomers"]:
        raise UserError(
            f"the run in '{run.folder}' held out no clients (data.newcomers = 0): use clients of another dataset "
            "(--data), or run with --set data.newcomers=0.4"
        )
    return NewcomerData(run.task, tuple(run.facts["newcomers"]), own=True)


def from_dataset(
    run: TrainedRun, name: str, *, folder: Path | None = None, clients: int = 20, partition: str = "dirichlet:1",
    split: str = "pooled:0.75", most: int | None = None, seed: int = 0,
) -> NewcomerData:  # fmt: skip
    """Divide another dataset among new clients, with images converted to the run's format.

    Args:
        run: The run.
        name: Name or path of the dataset.
        folder: Folder of downloaded datasets.
        clients: Number of clients.
        partition: How the dataset is divided, as in `data.partition`.
        split: How test samples are chosen, as in `data.split`.
        most: Maximum number of samples, as in `data.limit`.
        seed: Seed of the division.
    """
    channels, height, width = run.form.shape
    dataset = load(name, folder=folder, size=max(height, width))
    if most is not None:
        dataset = limit(dataset, most, seed)
    dataset = replace(dataset, inputs=in_channels(resize(dataset.inputs, (height, width)), channels))
    federation = federate(dataset, clients=clients, partition=partition, split=split, seed=seed)
    task = Task(dataset, federation, factory_of(run.facts["model"]), objectives.get("labels"))
    return NewcomerData(task, tuple(range(len(federation))), own=False)


def evaluate_newcomers(
    run: TrainedRun, data: NewcomerData, heads: Sequence[Head], *, steps: int = STEPS, alone_epochs: int | None = None,
    on_client: Callable[[int], None] | None = None,
) -> Record:  # fmt: skip
    """Measure the accuracy of every newcomer with each kind of model.

    Args:
        run: The run.
        data: The newcomers.
        heads: Heads to fit on the run's frozen representation, in the same way as `adapt`.
        steps: Training steps of linear and mlp heads.
        alone_epochs: Epochs of training the run's network from scratch on the newcomer's data, with the run's
            optimizer. Default: as many as a client of the run had on average; 0: no such training.
        on_client: Called with each newcomer that has been evaluated.

    Returns:
        Accuracies by newcomer (`clients`), and their mean, standard deviation and minimum by kind of model (`ways`).
    """
    base = run.representation()
    task = data.task
    classes = task.dataset.classes
    shared = _shared_model(run) if data.own else None
    fitters = [HeadFitter(base, classes, head, steps=steps, seed=run.recipe.seed) for head in heads]
    training = run.recipe.training
    epochs = _epochs(training) if alone_epochs is None else alone_epochs
    workspace = _alone(run, task, training, epochs) if epochs else None
    rows = []
    for client in data.clients:
        fit_on, test_on = task.federation.train[client], task.federation.test[client]
        name = task.federation.name(client)
        row: Record = {"client": client, "name": name, "train": len(fit_on), "test": len(test_on)}
        y = task.dataset.labels
        if shared is not None:
            row[GLOBAL] = _accuracy(_over(shared, task.dataset, test_on), y[test_on])
        z_fit, z_test = (_over(base.features, task.dataset, index) for index in (fit_on, test_on))
        for fitter in fitters:
            fitter.fit(z_fit, y[fit_on], client_id=client)
            row[fitter.head] = _accuracy(fitter.logits(z_test), y[test_on])
        if workspace is not None:
            row[ALONE] = _trained_alone(workspace, client)
        rows.append(row)
        if on_client is not None:
            on_client(client)
    ways = [way for way in (GLOBAL, *heads, ALONE) if way in rows[0]]
    return {
        "run": str(run.folder),
        "method": run.method.name,
        "data": task.dataset.name,
        "newcomers": len(rows),
        "representation": "average of the clients' extractors" if base.client == AVERAGED else "shared",
        "global": None if shared is None else "the global model" if shared.client != AVERAGED else AVERAGE,
        "alone_epochs": epochs,
        "ways": {way: _spread([row[way] for row in rows]) for way in ways},
        "clients": rows,
    }


def train_alone(run: TrainedRun, data: NewcomerData, training: Training, epochs: int | None = None) -> Record:
    """Train a run's network from scratch on each newcomer's data; return mean, standard deviation and minimum.

    Args:
        run: The run that has the network and the image format.
        data: The newcomers.
        training: Optimizer and batch size.
        epochs: Number of epochs. Default: as many as a client with this training has on average.
    """
    workspace = _alone(run, data.task, training, _epochs(training) if epochs is None else epochs)
    return _spread([_trained_alone(workspace, client) for client in data.clients])


def _trained_alone(workspace: Workspace, client: int) -> float:
    return perform(workspace, Job("evaluate", 1, Message({}), client=client)).scores[0].accuracy


def _shared_model(run: TrainedRun) -> TrainedModel | None:
    """Return the global model; without one, the average of the clients' models (FedCRC, §IV-D)."""
    if not run.method.has_global:
        return run.averaged()
    return None if run.method.overrides("generalise") and len(run.styles) > 1 else run.global_model()


def _epochs(training: Training) -> int:
    return max(1, round(training.rounds * training.epochs * training.fraction))


def _alone(run: TrainedRun, task: Task, training: Training, epochs: int) -> Workspace:
    """Create the workspace in which newcomers train alone, with the run's image format and augmentation."""
    own = run.recipe.data
    training = training.model_copy(update={"epochs": epochs})
    task = replace(task, augment=parse_augment(own.augment), objective=objectives.get("labels"))
    mean, std = run.form.statistics
    stored = replace(task.stored, mean=mean, std=std)
    return Workspace(Setup(task, methods.get("local"), training, run.recipe.seed), stored=stored)


@torch.no_grad()
def _over(model: Callable[[Tensor], Tensor], dataset: Dataset, index: np.ndarray) -> Tensor:
    """Apply a model to some images of a dataset, in chunks."""
    pieces = chunks(dataset.inputs[index])
    return torch.cat([model(piece) for piece in pieces]) if len(index) else torch.empty(0, 1)


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1) == y).double().mean()) if len(y) else float("nan")


def _spread(values: Sequence[float]) -> Record:
    known = np.array([value for value in values if not np.isnan(value)])
    if not len(known):
        return {"mean": None, "std": None, "worst": None}
    return {"mean": float(known.mean()), "std": float(known.std()), "worst": float(known.min())}


def in_channels(images: Tensor, channels: int) -> Tensor:
    """Convert images to this number of channels as Pillow does: grey is repeated, colour becomes luma.

    Raises:
        UserError: The conversion is not supported.
    """
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] != 3 or channels != 1:
        raise UserError(
            f"images with {images.shape[1]} channels cannot be converted to the {channels} channels of the run's images"
        )
    grey = torch.empty(len(images), 1, *images.shape[2:], dtype=torch.uint8)
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).reshape(3, 1, 1)
    for start in range(0, len(images), 1024):
        some = images[start : start + 1024].int()
        grey[start : start + 1024] = ((some * weights).sum(1, keepdim=True) + 0x8000).bitwise_right_shift(16)
    return grey
