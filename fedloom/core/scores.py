"""Scores of a model on clients' test or validation samples, per class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.metrics import Metric, Predictions
from fedloom.core.workspace import Workspace


@dataclass
class Scores:
    """Correct predictions and number of evaluated samples of a client, per class, and the summed cross-entropy.

    An organisation that does not disclose these has one count for all classes, and no loss.
    """

    client: int
    right: list[int]
    total: list[int]
    loss: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Further figures by name, if an experiment asks for them; None if undefined for the client's samples."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN without test samples."""
        return sum(self.right) / sum(self.total) if sum(self.total) else float("nan")


@dataclass
class Answers:
    """A model's predictions on test samples, on the model's device. `scores` waits for the device."""

    labels: Tensor
    right: Tensor
    loss: Tensor
    classes: int
    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    """Number of test samples of each client, in the order of the samples."""
    metrics: tuple[Metric, ...] = ()
    """Further figures to compute."""
    predicted: tuple[Tensor, ...] = ()
    """With `metrics`: predicted classes and their probabilities; with the AUC also the probabilities of all classes.

    A job is about a few thousand samples or one client, which bounds the memory.
    """

    def scores(self) -> list[Scores]:
        """Return the scores of each client; waits for the device."""
        labels, right, loss = (column.cpu().numpy() for column in (self.labels, self.right, self.loss))
        cuts = np.cumsum(self.sizes)[:-1]
        columns = [np.split(column, cuts) for column in (labels, right, loss)]
        found = [self._of(client, *part) for client, *part in zip(self.clients, *columns, strict=True)]
        if self.metrics:
            predicted = [np.split(column.cpu().numpy(), cuts) for column in self.predicted]
            for scores, *part in zip(found, columns[0], *predicted, strict=True):
                answers = Predictions(*part)
                scores.metrics = {name: answers.figure(name) for name in self.metrics}
        return found

    def _of(self, client: int, labels: np.ndarray, right: np.ndarray, loss: np.ndarray) -> Scores:
        total = np.bincount(labels, minlength=self.classes)
        hit = np.bincount(labels[right], minlength=self.classes)
        return Scores(client, hit.tolist(), total.tolist(), float(loss.sum(dtype=np.float64)))


@torch.no_grad()
def answers(workspace: Workspace, samples: Mapping[int, np.ndarray], predict: Callable[[Tensor], Tensor]) -> Answers:
    """Predict samples of some clients, in large batches."""
    columns: list[tuple[Tensor, ...]] = []
    metrics = workspace.setup.metrics
    index = torch.from_numpy(np.concatenate(list(samples.values()))).to(workspace.device)
    for chunk in index.split(workspace.evaluation_batch):
        if len(chunk) == 0:
            continue
        with workspace.autocast():
            logits = predict(workspace.pixels.plain(chunk)).float()
        y = workspace.pixels.labels[chunk]
        more = _predicted(logits, probabilities="auc" in metrics) if metrics else ()
        columns.append((y, logits.argmax(1) == y, cross_entropy(logits, y, reduction="none"), *more))
    if not columns:
        nothing = torch.zeros(0, workspace.setup.task.classes, device=workspace.device)
        more = _predicted(nothing, probabilities="auc" in metrics) if metrics else ()
        columns = [(index, index.bool(), index.float(), *more)]
    labels, right, loss, *predicted = (torch.cat(column) for column in zip(*columns, strict=True))
    sizes = tuple(len(part) for part in samples.values())
    classes = workspace.setup.task.classes
    return Answers(labels, right, loss, classes, tuple(samples), sizes, metrics, tuple(predicted))


def _predicted(logits: Tensor, *, probabilities: bool) -> tuple[Tensor, ...]:
    """Return predicted classes, their probabilities and, if asked for, the probabilities of all classes, in float64."""
    share = logits.double().softmax(1)
    answers = logits.argmax(1), share.amax(1)
    return (*answers, share) if probabilities else answers
