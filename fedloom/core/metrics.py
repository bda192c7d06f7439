"""Figures of a classifier on one client's samples, besides accuracy and loss.

Each figure follows scikit-learn's definition, which tests compare. They need few lines, and scikit-learn's functions
take milliseconds each, which is too long for thousands of clients per evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Metric = Literal["balanced_accuracy", "macro_f1", "auc", "ece"]
BINS = 15
"""Number of equally wide bins of the expected calibration error."""


@dataclass(frozen=True)
class Predictions:
    """A classifier's answers on the samples of one client, in float64."""

    labels: np.ndarray
    """int64 [N]"""
    predicted: np.ndarray
    """int64 [N]: the class with the highest probability"""
    confidence: np.ndarray
    """float64 [N]: probability of the predicted class"""
    probabilities: np.ndarray | None = None
    """float64 [N, classes]; None unless the AUC is wanted"""

    def figure(self, name: Metric) -> float | None:
        """Return a figure; None if it is undefined for these samples or the answers are not finite."""
        if not len(self.labels) or not np.isfinite(self.confidence).all():
            return None
        return METRICS[name](self)


def balanced_accuracy(found: Predictions) -> float:
    """Return the mean recall over the classes of the samples."""
    total = np.bincount(found.labels)
    right = np.bincount(found.labels[found.labels == found.predicted], minlength=len(total))
    return float(np.mean(right[total > 0] / total[total > 0]))


def macro_f1(found: Predictions) -> float:
    """Return the mean F1 score over the classes of the samples or predictions; 0 for a class without a hit."""
    classes = 1 + int(max(found.labels.max(), found.predicted.max()))
    total, given = (np.bincount(column, minlength=classes) for column in (found.labels, found.predicted))
    right = np.bincount(found.labels[found.labels == found.predicted], minlength=classes)
    present = total + given > 0
    return float(np.mean(2 * right[present] / (total + given)[present]))


def auc(found: Predictions) -> float | None:
    """Return the area under the ROC curve; None if all samples are of one class.

    With two classes it is that of the second class. With more it is the mean over one-vs-rest curves of the classes
    that the samples have: no curve exists for a class without samples.
    """
    assert found.probabilities is not None
    present = np.unique(found.labels)
    if len(present) < 2:
        return None
    classes = [1] if found.probabilities.shape[1] == 2 else present
    return float(np.mean([_area(found.labels == c, found.probabilities[:, c]) for c in classes]))


def _area(positive: np.ndarray, scores: np.ndarray) -> float:
    """Return the share of pairs whose positive sample has the higher score; ties count half (Mann-Whitney)."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    yes = int(positive.sum())
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * (len(scores) - yes)))


def ece(found: Predictions) -> float:
    """Return the expected calibration error: the mean over samples of a bin's |accuracy - confidence|."""
    bins = np.clip(
        np.ceil(found.confidence * BINS).astype(np.int64) - 1, 0, BINS - 1
    )  # bins (0, 1/15], (1/15, 2/15], …
    gap = (found.labels == found.predicted) - found.confidence
    return float(np.abs(np.bincount(bins, weights=gap, minlength=BINS)).sum() / len(bins))


METRICS: dict[Metric, Callable[[Predictions], float | None]] = {
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "auc": auc,
    "ece": ece,
}
