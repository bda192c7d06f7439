"""Figures besides the accuracy in deployments: which are sent, with how much noise, and who must have named them."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from federated import NAMES, LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe

from fedloom.core.errors import UserError
from fedloom.core.message import MessageError
from fedloom.core.metrics import Predictions
from fedloom.core.scores import Scores
from fedloom.deploy import evaluation
from fedloom.deploy.engine import _check_scores
from fedloom.deploy.evaluation import NAMED, SENSITIVITY, EvaluationTerms
from fedloom.trust.ledger_file import read_ledger

ALL = ("balanced_accuracy", "macro_f1", "auc", "ece", "loss")
FOUND = Scores(0, [30, 10], [60, 40], 70.0, {"balanced_accuracy": 0.375, "macro_f1": 0.4, "auc": 0.61237, "ece": 0.123})


@pytest.fixture
def seeded(monkeypatch):
    monkeypatch.setattr(evaluation, "_random", random.Random(3))


def test_by_default_only_the_figure_with_noise_is_sent():
    sent = EvaluationTerms().shared(FOUND, ALL)
    assert set(sent.metrics) == {"ece"} and sent.loss is None
    assert EvaluationTerms().shared(FOUND).metrics == {}  # the recipe asks for none
    assert EvaluationTerms().computed(ALL) == ("ece",)


def test_named_figures_are_sent_without_noise_and_rounded():
    terms = EvaluationTerms(metrics=("auc", "loss"))
    sent = terms.shared(FOUND, ALL)
    assert sent.metrics["auc"] == 0.612 and sent.loss == pytest.approx(70) and set(sent.metrics) == {"auc", "ece"}
    assert terms.shared(replace(FOUND, loss=math.inf), ALL).loss is None
    assert terms.shared(FOUND, ("ece",)).loss is None  # named, but the recipe does not ask for it
    undefined = replace(FOUND, metrics=FOUND.metrics | {"auc": None})
    assert terms.shared(undefined, ALL).metrics["auc"] is None


def test_balanced_accuracy_follows_from_noisy_counts_per_class(seeded):
    sent = EvaluationTerms("classes").shared(FOUND, ALL)
    assert sent.right != FOUND.right
    assert sent.metrics["balanced_accuracy"] == pytest.approx((sent.right[0] / 60 + sent.right[1] / 40) / 2)


def test_an_answer_divides_its_epsilon_among_its_figures(seeded):
    """The variance of a discrete Laplace number is 2q / (1 - q)² with q = exp(-ε / sensitivity)."""
    terms, many = EvaluationTerms(epsilon=1.0), Scores(0, [50_000], [100_000], None, {"ece": 0.5})
    drawn = [terms.shared(many, ("ece",)) for _ in range(6000)]
    counts = np.array([sent.right[0] for sent in drawn])
    figures = np.array([sent.metrics["ece"] for sent in drawn]) * 100_000
    for values, sensitivity in ((counts, 1), (figures, SENSITIVITY["ece"])):
        q = math.exp(-0.5 / sensitivity)
        assert values.var() == pytest.approx(2 * q / (1 - q) ** 2, rel=0.1)
        assert np.allclose(values, values.round(), atol=1e-6)  # whole numbers: no digit escapes the noise


def test_one_image_changes_the_calibration_error_by_its_sensitivity_at_most():
    rng = np.random.default_rng(0)
    n, most = 20, 0.0
    for _ in range(3000):
        labels, predicted, sure = rng.integers(0, 2, n), rng.integers(0, 2, n), rng.random(n)
        before = Predictions(labels, predicted, sure).figure("ece")
        labels[0], predicted[0], sure[0] = rng.integers(0, 2), rng.integers(0, 2), rng.choice([0.0, 1.0, rng.random()])
        most = max(most, n * abs(before - Predictions(labels, predicted, sure).figure("ece")))
    assert 1 < most <= SENSITIVITY["ece"]


def test_terms_name_only_known_figures():
    with pytest.raises(UserError, match="--share-metrics ece: must be among balanced_accuracy, f1, macro_f1, auc"):
        EvaluationTerms(metrics=("ece",))
    assert EvaluationTerms(metrics=NAMED).covers("loss")


def test_the_terms_are_shown_before_an_organisation_joins():
    text = "\n".join(EvaluationTerms(answers=4).lines(100, ALL))
    assert "and with noise: ece; the ε of an answer is divided among its figures" in text and "never the loss" in text
    assert "never: balanced_accuracy, macro_f1, auc, loss (--share-metrics would allow it)" in text
    text = "\n".join(EvaluationTerms("classes", 4, metrics=("auc", "loss")).lines(100, ALL))
    assert "WITHOUT noise (--share-metrics): auc, loss" in text and "never the loss" not in text
    assert "nothing more is revealed: balanced_accuracy" in text and "never: macro_f1" in text


def test_a_run_has_the_figures_that_organisations_share_and_ledgers_list_them(tmp_path):
    recipe = small_recipe("fedavg", evaluation__metrics=["ece", "auc", "loss"], evaluation__every=2)
    make_federation(tmp_path / "fed", recipe)
    open_to_all = EvaluationTerms(min_test=0, epsilon=math.inf, metrics=("auc", "loss"))
    terms = {"north": open_to_all, "south": open_to_all, "west": EvaluationTerms(min_test=0, epsilon=math.inf)}
    members = {100 + c: member(tmp_path / "fed", name, evaluation=terms[name]) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe)
    fleet.wait_for(3, 3, 1)
    experiment = make_experiment(fleet, recipe.with_(out=tmp_path / "run"))
    summary = experiment.run()
    assert summary["personal_ece_clients"] == 3 and 0 < summary["personal_ece"] < 1
    assert summary["personal_auc_clients"] == summary["personal_loss_clients"] == 2
    assert [set(scores.metrics) for scores in experiment.scores] == [{"ece", "auc"}, {"ece", "auc"}, {"ece"}]
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[0])
    assert row["metrics"]["ece"] == pytest.approx(round(row["metrics"]["ece"] * sum(row["total"])) / sum(row["total"]))

    def figures(ledger):
        sent = [entry for entry in ledger["messages"] if (entry["direction"], entry["purpose"]) == ("up", "evaluation")]
        return sorted({tensor["name"] for entry in sent for tensor in entry["tensors"]})

    own = {name: read_ledger(tmp_path / "fed" / "organisations" / name / "runs" / "one") for name in NAMES}
    assert figures(own["north"]) == ["auc", "ece", "loss", "right", "tested"]
    assert figures(own["west"]) == ["ece", "right", "tested"]
    assert figures(read_ledger(tmp_path / "run")) == figures(own["north"])


def test_a_member_refuses_a_figure_that_its_classes_do_not_have(tmp_path):
    recipe = small_recipe("fedavg", evaluation__metrics=["f1"])
    make_federation(tmp_path / "fed", recipe)
    north = member(tmp_path / "fed", "north")
    with pytest.raises(UserError, match="evaluation.metrics = f1: it is not defined for data with 10 classes"):
        north._refuse_undefined(recipe)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"metrics": {"auc": 0.5}}, "'auc', which the recipe does not ask for"),
        ({"metrics": {"ece": 1.5}}, "ece is not between 0 and 1"),
        ({"metrics": {"ece": math.nan}}, "ece is not between 0 and 1"),
        ({"loss": 3.0}, "the recipe does not ask for"),
    ],
)
def test_the_server_refuses_other_figures(change, why):
    scores = replace(Scores(0, [1, 2], [3, 3], None, {"ece": 0.5}), **change)
    with pytest.raises(MessageError, match=why):
        _check_scores(scores, 0, 2, ("ece",))
    _check_scores(Scores(0, [1, 2], [3, 3], None, {"ece": None}), 0, 2, ("ece",))
    with pytest.raises(MessageError, match="not a number from 0"):
        _check_scores(SimpleNamespace(**vars(scores) | {"metrics": {}, "loss": math.inf}), 0, 2, ("loss",))
