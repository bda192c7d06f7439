"""Figures of a model on one client's samples, besides accuracy and loss.

Each figure follows scikit-learn's definition, which tests compare. They need few lines, and scikit-learn's functions
take milliseconds each, which is too long for thousands of clients per evaluation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.core.errors import UserError

Metric = Literal["balanced_accuracy", "f1", "macro_f1", "micro_f1", "auc", "ece", "exact_match"]
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
        return CLASS_METRICS[name](self)


@dataclass(frozen=True)
class LabelPredictions:
    """A multilabel model's answers on the samples of one client."""

    labels: np.ndarray
    """bool [N, labels]"""
    probabilities: np.ndarray
    """float64 [N, labels]"""

    @property
    def predicted(self) -> np.ndarray:
        """Labels with a probability above 0.5, bool [N, labels]."""
        return self.probabilities > 0.5

    def figure(self, name: Metric) -> float | None:
        """Return a figure; None if it is undefined for these samples or the answers are not finite."""
        if not len(self.labels) or not np.isfinite(self.probabilities).all():
            return None
        return LABEL_METRICS[name](self)


def balanced_accuracy(found: Predictions) -> float:
    """Return the mean recall over the classes of the samples."""
    total = np.bincount(found.labels)
    right = np.bincount(found.labels[found.labels == found.predicted], minlength=len(total))
    return float(np.mean(right[total > 0] / total[total > 0]))


def f1(found: Predictions) -> float | None:
    """Return the F1 score of the second of two classes; None if no sample is of this class or predicted as it."""
    return _f1((found.labels == 1)[:, None], (found.predicted == 1)[:, None])


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
    return _calibration_error(found.labels == found.predicted, found.confidence)


def _calibration_error(right: np.ndarray, confidence: np.ndarray) -> float:
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)  # bins (0, 1/15], (1/15, 2/15], …
    return float(np.abs(np.bincount(bins, weights=right - confidence, minlength=BINS)).sum() / len(bins))


def _f1(labels: np.ndarray, predicted: np.ndarray) -> float | None:
    """Return the mean F1 score over columns, without those that are neither true nor predicted of any sample."""
    right, given = (labels & predicted).sum(0), labels.sum(0) + predicted.sum(0)
    return float(np.mean(2 * right[given > 0] / given[given > 0])) if given.any() else None


def label_macro_f1(found: LabelPredictions) -> float | None:
    """Return the mean F1 score over the labels that samples have or predictions name; None without any."""
    return _f1(found.labels, found.predicted)


def label_micro_f1(found: LabelPredictions) -> float | None:
    """Return the F1 score over all decisions together; None if no label is true or predicted."""
    return _f1(found.labels.reshape(-1, 1), found.predicted.reshape(-1, 1))


def label_auc(found: LabelPredictions) -> float | None:
    """Return the mean over labels of the area under the ROC curve, of labels that some but not all samples have."""
    count = found.labels.sum(0)
    mixed = np.flatnonzero((count > 0) & (count < len(found.labels)))
    return float(np.mean([_area(found.labels[:, k], found.probabilities[:, k]) for k in mixed])) if len(mixed) else None


def label_ece(found: LabelPredictions) -> float:
    """Return the expected calibration error over all decisions; the confidence of a "no" is 1 - probability."""
    confidence = np.maximum(found.probabilities, 1 - found.probabilities)
    return _calibration_error((found.labels == found.predicted).ravel(), confidence.ravel())


def exact_match(found: LabelPredictions) -> float:
    """Return the share of samples whose labels are all predicted correctly (subset accuracy)."""
    return float(np.mean((found.labels == found.predicted).all(1)))


CLASS_METRICS: dict[Metric, Callable[[Predictions], float | None]] = {
    "balanced_accuracy": balanced_accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "auc": auc,
    "ece": ece,
}
LABEL_METRICS: dict[Metric, Callable[[LabelPredictions], float | None]] = {
    "macro_f1": label_macro_f1,
    "micro_f1": label_micro_f1,
    "auc": label_auc,
    "ece": label_ece,
    "exact_match": exact_match,
}


def refuse_undefined(names: Sequence[Metric], *, classes: int, multilabel: bool) -> None:
    """Raise a UserError if a figure is not defined for this kind of labels.

    Args:
        names: The figures.
        classes: Number of classes, or of labels.
        multilabel: Whether a sample can have several labels.
    """
    known = [name for name in (LABEL_METRICS if multilabel else CLASS_METRICS) if name != "f1" or classes == 2]
    for name in names:
        if name not in known:
            what = "several labels per sample" if multilabel else f"{classes} classes"
            raise UserError(
                f"evaluation.metrics = {name}: it is not defined for data with {what}; choose among "
                f"{', '.join(known)}, loss"
            )
