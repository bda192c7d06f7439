"""Figures of one client, against scikit-learn."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, roc_auc_score

from fedloom.core.metrics import CLASS_METRICS, LABEL_METRICS, LabelPredictions, Predictions


def predictions(samples: int, classes: int, present: int, seed: int = 0, digits: int = 16) -> Predictions:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(samples) % present)
    logits = rng.normal(size=(samples, classes)) + 1.5 * np.eye(classes)[labels] * (rng.random((samples, 1)) < 0.7)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares = shares.round(digits)  # few digits: ties
    return Predictions(labels, shares.argmax(1), shares.max(1), shares)


@pytest.mark.parametrize("digits", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_scikit_learn(seed, digits):
    found = predictions(97, 5, 5, seed, digits)
    assert found.figure("balanced_accuracy") == pytest.approx(balanced_accuracy_score(found.labels, found.predicted))
    assert found.figure("macro_f1") == pytest.approx(f1_score(found.labels, found.predicted, average="macro"))
    each = [roc_auc_score(found.labels == c, found.probabilities[:, c]) for c in range(5)]
    assert found.figure("auc") == pytest.approx(np.mean(each))
    if digits == 16:
        whole = roc_auc_score(found.labels, found.probabilities, multi_class="ovr", average="macro")
        assert found.figure("auc") == pytest.approx(whole)


@pytest.mark.parametrize("digits", [1, 16])
def test_two_classes_have_the_auc_of_the_second(digits):
    found = predictions(60, 2, 2, digits=digits)
    assert found.figure("auc") == pytest.approx(roc_auc_score(found.labels, found.probabilities[:, 1]))


def test_a_client_with_some_of_the_classes():
    found = predictions(50, 6, 3)
    assert set(found.predicted) - set(found.labels)  # classes that only predictions have
    assert found.figure("macro_f1") == pytest.approx(f1_score(found.labels, found.predicted, average="macro"))
    recall = [(found.predicted == c)[found.labels == c].mean() for c in range(3)]
    assert found.figure("balanced_accuracy") == pytest.approx(np.mean(recall))
    each = [roc_auc_score(found.labels == c, found.probabilities[:, c]) for c in range(3)]
    assert found.figure("auc") == pytest.approx(np.mean(each))


def test_one_class_has_no_auc():
    found = predictions(20, 4, 1)
    assert found.figure("auc") is None
    assert found.figure("balanced_accuracy") == (found.predicted == 0).mean()


def test_calibration_error_bin_by_bin():
    found = predictions(400, 4, 4)
    right = found.predicted == found.labels
    edges = np.linspace(0, 1, 16)
    expected = 0.0
    for low, high in pairwise(edges):
        inside = (found.confidence > low) & (found.confidence <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - found.confidence[inside].mean())
    assert found.figure("ece") == pytest.approx(expected)
    assert expected > 0.02


def test_a_perfectly_confident_classifier_has_its_error_rate_as_calibration_error():
    labels, sure = np.array([0, 1, 1, 0]), np.ones(4)
    assert Predictions(labels, np.array([0, 1, 0, 0]), sure).figure("ece") == 0.25


@pytest.mark.parametrize("name", CLASS_METRICS)
def test_nothing_is_said_about_no_samples_or_answers_that_are_not_finite(name):
    nothing = np.empty(0, np.int64)
    assert Predictions(nothing, nothing, nothing.astype(float), np.empty((0, 3))).figure(name) is None
    shares = np.full((2, 3), np.nan)
    assert Predictions(np.array([0, 1]), np.array([0, 0]), shares[:, 0], shares).figure(name) is None


def test_two_classes_have_the_f1_of_the_second():
    found = predictions(60, 2, 2)
    assert found.figure("f1") == pytest.approx(f1_score(found.labels, found.predicted))
    nobody = np.zeros(3, np.int64)
    assert Predictions(nobody, nobody, np.ones(3)).figure("f1") is None
    assert Predictions(nobody, np.array([0, 1, 0]), np.ones(3)).figure("f1") == 0


def labelled(samples: int, labels: int, seed: int = 0) -> LabelPredictions:
    rng = np.random.default_rng(seed)
    true = rng.random((samples, labels)) < np.linspace(0.1, 0.7, labels)
    return LabelPredictions(true, np.clip(0.6 * true + rng.normal(0.2, 0.25, true.shape), 0, 1))


@pytest.mark.parametrize("seed", range(4))
def test_figures_of_several_labels_are_those_of_scikit_learn(seed):
    found = labelled(83, 5, seed)
    for average in ("macro", "micro"):
        expected = f1_score(found.labels, found.predicted, average=average)
        assert found.figure(f"{average}_f1") == pytest.approx(expected)
    assert found.figure("auc") == pytest.approx(roc_auc_score(found.labels, found.probabilities, average="macro"))
    assert found.figure("exact_match") == pytest.approx(accuracy_score(found.labels, found.predicted))
    flat = found.labels.ravel().astype(int), found.predicted.ravel().astype(int)
    confidence = np.maximum(found.probabilities, 1 - found.probabilities).ravel()
    assert found.figure("ece") == pytest.approx(Predictions(*flat, confidence).figure("ece"))


def test_labels_that_nobody_has_or_everybody_has():
    whole = labelled(40, 4)
    labels, shares = whole.labels.copy(), whole.probabilities.copy()
    labels[:, 0], shares[:, 0] = False, 0.1
    labels[:, 1], shares[:, 1] = True, 0.9
    found = LabelPredictions(labels, shares)
    expected = f1_score(labels, found.predicted, average="macro", zero_division=np.nan)
    assert found.figure("macro_f1") == pytest.approx(expected)
    assert found.figure("auc") == pytest.approx(roc_auc_score(labels[:, 2:], shares[:, 2:]))
    empty = LabelPredictions(labels[:, :1], shares[:, :1])
    assert empty.figure("auc") is empty.figure("macro_f1") is empty.figure("micro_f1") is None
    assert empty.figure("exact_match") == 1


@pytest.mark.parametrize("name", LABEL_METRICS)
def test_nothing_is_said_about_no_samples_with_labels(name):
    assert LabelPredictions(np.zeros((0, 3), bool), np.zeros((0, 3))).figure(name) is None
    assert LabelPredictions(np.zeros((2, 3), bool), np.full((2, 3), np.nan)).figure(name) is None
