"""Further figures of an evaluation: over clients by hand, per client against scikit-learn, equal on every engine."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from tiny import tiny_run, tiny_task, with_validation, without_times

from fedloom.core.scores import Scores
from fedloom.experiment.selection import best_round
from fedloom.experiment.summary import figures_of, summary_of

ALL = ["balanced_accuracy", "macro_f1", "auc", "ece", "loss"]


def client(total: int, loss: float | None = 0.0, **metrics: float | None) -> Scores:
    return Scores(0, [0], [total], loss, metrics)


def test_over_clients_in_closed_form_without_those_that_have_no_figure():
    clients = [client(10, auc=0.5, ece=0.1), client(30, auc=0.9, ece=0.3), client(60, auc=None, ece=0.2)]
    assert figures_of(clients, "personal", ["auc"]) == {
        "personal_auc": pytest.approx(0.7),
        "personal_auc_weighted": pytest.approx((10 * 0.5 + 30 * 0.9) / 40),
        "personal_auc_std": pytest.approx(0.2),
        "personal_auc_worst": 0.5,
        "personal_auc_clients": 2,
    }
    assert figures_of(clients, "personal", ["ece"])["personal_ece_worst"] == 0.3  # the highest error is the worst
    assert figures_of([client(5, auc=None)], "personal", ["auc"])["personal_auc"] is None
    assert figures_of([client(5, auc=None)], "personal", ["auc"])["personal_auc_clients"] == 0


def test_the_loss_of_clients():
    found = figures_of([client(10, loss=20.0), client(30, loss=30.0), client(0)], "personal", ["loss"])
    assert found == {
        "personal_loss_unweighted": 1.5,
        "personal_loss_weighted": pytest.approx(50 / 40),
        "personal_loss_std": 0.5,
        "personal_loss_worst": 2.0,
        "personal_loss_clients": 2,
    }


def test_clients_figures_are_those_of_scikit_learn_and_one_class_has_no_auc():
    task = tiny_task()
    run = tiny_run("fedavg", task=task, evaluation__metrics=ALL)
    server = run.evaluator.server
    server.load(run.server.state, None)
    server.modes.evaluate_only()
    for scores in run.scores:
        held = task.federation.test[scores.client]
        with torch.no_grad():
            predicted = server.parts.model(task.stored.plain(torch.from_numpy(held))).argmax(1).numpy()
        labels = task.dataset.labels[held].numpy()
        assert scores.metrics["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
        assert scores.metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert [scores.metrics["auc"] is None for scores in run.scores] == [False] * 4 + [True] * 2
    last = run.history[-1]
    assert (last["personal_auc_clients"], last["personal_ece_clients"]) == (4, 6)
    assert last["personal_auc"] == pytest.approx(np.mean([s.metrics["auc"] for s in run.scores[:4]]))
    assert last["global_mean_auc"] == last["personal_auc"]  # fedavg has one model for all
    assert last["personal_loss_weighted"] == pytest.approx(last["personal_loss"])
    row = json.loads((run.folder.path / "clients.jsonl").read_text().splitlines()[4])
    assert row["metrics"]["auc"] is None
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["personal_auc_worst"] == last["personal_auc_worst"]


def test_they_change_nothing_else_and_are_not_there_by_default():
    plain, more = tiny_run("fedper"), tiny_run("fedper", evaluation__metrics=ALL)
    known = without_times(plain.history)
    assert [
        {k: v for k, v in one.items() if k in known[i]} for i, one in enumerate(without_times(more.history))
    ] == known
    assert not [name for name in known[-1] if "auc" in name or "f1" in name]
    assert all(scores.metrics == {} for scores in plain.scores)


@pytest.mark.parametrize("engine", ["processes", "replay"])
@pytest.mark.parametrize(
    "method",
    [pytest.param("fedavg", marks=pytest.mark.slow), "fedper", pytest.param("fedavg+ft", marks=pytest.mark.slow)],
)
def test_engines_agree(engine, method):
    fields = {"task": with_validation(tiny_task()), "evaluation__metrics": ALL}
    expected, got = (tiny_run(method, engine=name, **fields) for name in ("inline", engine))
    assert expected.history[-1]["validation_personal_auc_clients"] == 4
    assert without_times(got.history) == without_times(expected.history)
    assert got.scores == expected.scores
    assert got.evaluator.validation == expected.evaluator.validation


@pytest.mark.parametrize("measure", ["ece", "auc", "loss"])
def test_any_of_them_can_choose_the_round(measure):
    fields = {"training__rounds": 6, "training__patience": 2, "evaluation__measure": measure}
    run = tiny_run("fedper", task=with_validation(tiny_task()), **fields)
    values = [record[f"validation_personal_{measure}"] for record in run.history]
    pick = np.argmax if measure == "auc" else np.argmin
    assert best_round(run.history, measure)["round"] == 1 + pick(values)
    assert summary_of(run.history, "last", (), name=measure)["best"]["round"] == 1 + pick(values)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert (summary["restored"], summary["measure"]) == (1 + pick(values), measure)
    assert summary[f"validation_personal_{measure}"] == values[pick(values)]
