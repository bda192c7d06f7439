"""Scores of a model on clients' test or validation samples, per class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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

    def scores(self) -> list[Scores]:
        """Return the scores of each client; waits for the device."""
        labels, right, loss = (column.cpu().numpy() for column in (self.labels, self.right, self.loss))
        cuts = np.cumsum(self.sizes)[:-1]
        columns = (np.split(column, cuts) for column in (labels, right, loss))
        return [self._of(client, *part) for client, *part in zip(self.clients, *columns, strict=True)]

    def _of(self, client: int, labels: np.ndarray, right: np.ndarray, loss: np.ndarray) -> Scores:
        total = np.bincount(labels, minlength=self.classes)
        hit = np.bincount(labels[right], minlength=self.classes)
        return Scores(client, hit.tolist(), total.tolist(), float(loss.sum(dtype=np.float64)))


@torch.no_grad()
def answers(workspace: Workspace, samples: Mapping[int, np.ndarray], predict: Callable[[Tensor], Tensor]) -> Answers:
    """Predict the test samples of some clients, in large batches."""
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    index = torch.from_numpy(np.concatenate(list(samples.values()))).to(workspace.device)
    for chunk in index.split(workspace.evaluation_batch):
        if len(chunk) == 0:
            continue
        with workspace.autocast():
            logits = predict(workspace.pixels.plain(chunk)).float()
        y = workspace.pixels.labels[chunk]
        columns.append((y, logits.argmax(1) == y, cross_entropy(logits, y, reduction="none")))
    empty = (index, index.bool(), index.float())
    labels, right, loss = (torch.cat(column) for column in zip(*(columns or [empty]), strict=True))
    sizes = tuple(len(part) for part in samples.values())
    return Answers(labels, right, loss, workspace.setup.task.classes, tuple(samples), sizes)
