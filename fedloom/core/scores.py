"""Scores of a model on clients' test or validation samples, per class or label."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedloom.core.metrics import LabelPredictions, Metric, Predictions

BACKDOOR = "backdoor"
"""Name of the figure of a simulated backdoor: share of the samples of other classes than the target class that are
predicted as the target class once they have the trigger."""


@dataclass
class Scores:
    """Correct predictions and number of evaluated samples of a client, per class, and the summed cross-entropy.

    With several labels per sample, every label is a yes-or-no decision about every sample: the numbers are those of
    correct and of all decisions per label, and the loss is summed over all decisions.

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
        """Share of correct predictions (of correct decisions with several labels); NaN without test samples."""
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

    With several labels per sample: the probabilities of all labels.

    A job is about a few thousand samples or one client, which bounds the memory.
    """
    fooled: Tensor | None = None
    """With a simulated backdoor: whether the sample is predicted as the target class once it has the trigger."""
    target: int = -1
    """The target class of the backdoor."""

    def scores(self) -> list[Scores]:
        """Return the scores of each client; waits for the device."""
        labels, right, loss = (column.cpu().numpy() for column in (self.labels, self.right, self.loss))
        cuts = np.cumsum(self.sizes)[:-1]
        columns = [np.split(column, cuts) for column in (labels, right, loss)]
        of = self._of_classes if self.labels.dim() == 1 else self._of_labels
        found = [of(client, *part) for client, *part in zip(self.clients, *columns, strict=True)]
        if self.metrics:
            predicted = [np.split(column.cpu().numpy(), cuts) for column in self.predicted]
            for scores, y, *part in zip(found, columns[0], *predicted, strict=True):
                answers = Predictions(y, *part) if y.ndim == 1 else LabelPredictions(y.astype(bool), *part)
                scores.metrics = {name: answers.figure(name) for name in self.metrics}
        if self.fooled is not None:
            for scores, y, fooled in zip(found, columns[0], np.split(self.fooled.cpu().numpy(), cuts), strict=True):
                others = fooled[y != self.target]
                scores.metrics[BACKDOOR] = float(others.mean()) if len(others) else None
        return found

    def _of_classes(self, client: int, labels: np.ndarray, right: np.ndarray, loss: np.ndarray) -> Scores:
        total = np.bincount(labels, minlength=self.classes)
        hit = np.bincount(labels[right], minlength=self.classes)
        return Scores(client, hit.tolist(), total.tolist(), float(loss.sum(dtype=np.float64)))

    def _of_labels(self, client: int, labels: np.ndarray, right: np.ndarray, loss: np.ndarray) -> Scores:
        return Scores(client, right.sum(0).tolist(), [len(labels)] * self.classes, float(loss.sum(dtype=np.float64)))
