"""Scores of a model on a client's test samples, per class."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.workspace import Workspace


@dataclass
class Scores:
    """Right answers and test samples of a client, per class, and the summed cross-entropy.

    An organisation that shares less has one number for all classes together, and no loss.
    """

    client: int
    right: list[int]
    total: list[int]
    loss: float | None

    @property
    def accuracy(self) -> float:
        """Right answers among all (not a number without test samples)."""
        return sum(self.right) / sum(self.total) if sum(self.total) else float("nan")


@dataclass
class Answers:
    """A model's answers on some test samples."""

    labels: np.ndarray
    right: np.ndarray
    loss: np.ndarray
    classes: int

    def split(self, cuts: np.ndarray) -> list["Answers"]:
        """Cut into consecutive pieces."""
        columns = (np.split(a, cuts) for a in (self.labels, self.right, self.loss))
        return [Answers(labels, right, loss, self.classes) for labels, right, loss in zip(*columns, strict=True)]

    def of(self, client: int) -> Scores:
        """As this client's scores."""
        total = np.bincount(self.labels, minlength=self.classes)
        right = np.bincount(self.labels[self.right], minlength=self.classes)
        return Scores(client, right.tolist(), total.tolist(), float(self.loss.sum(dtype=np.float64)))


@torch.no_grad()
def answers(workspace: Workspace, samples: np.ndarray, predict: Callable[[Tensor], Tensor]) -> Answers:
    """Answers on test samples, in large batches."""
    labels: list[Tensor] = []
    right: list[Tensor] = []
    loss: list[Tensor] = []
    for chunk in torch.from_numpy(samples).to(workspace.device).split(workspace.evaluation_batch):
        if len(chunk) == 0:
            continue
        with workspace.autocast():
            logits = predict(workspace.pixels.plain(chunk)).float()
        y = workspace.pixels.labels[chunk]
        labels.append(y)
        right.append(logits.argmax(1) == y)
        loss.append(cross_entropy(logits, y, reduction="none"))
    if not labels:
        empty = np.empty(0, np.int64)
        return Answers(empty, empty.astype(bool), empty.astype(np.float32), workspace.setup.task.classes)
    known, hit, nats = (torch.cat(column).cpu().numpy() for column in (labels, right, loss))
    return Answers(known, hit, nats, workspace.setup.task.classes)
