"""Binary and multilabel tasks, also on tables: the same numbers on every engine, and figures that fit each other."""

import numpy as np
import pytest
import torch
from references import figures
from tiny import same_state, task_of_kind, tiny_run, with_validation, without_times
from torch import nn

import fedloom
from fedloom import objectives
from fedloom.core.errors import UserError
from fedloom.methods import METHODS

BINARY = ("fedavg", "fedproto", "fedcrl", "fedpac", "fedgh", "fedcrc", "repper", "apfl", "fedavg+svm")
MULTILABEL = ("fedavg+ft", "ditto", "moon", "scaffold", "fedcka", "perfedavg")
ONE_CLASS = (
    "fedas", "fedcp", "fedcrc", "fedcrl", "feddbe", "fedgh", "fedlc", "fedpac", "fedproto", "fedrod", "fedtgp", "gpfl",
    "repper",
)  # fmt: skip
FIGURES = {
    "binary": ["f1", "auc", "balanced_accuracy", "ece", "macro_f1", "loss"],
    "multilabel": ["exact_match", "macro_f1", "micro_f1", "auc", "ece", "loss"],
}


CASES = [("binary", m) for m in BINARY] + [("multilabel", m) for m in MULTILABEL]
SLOW = ("repper", "apfl", "fedpac", "fedcka", "perfedavg")
# Every case on either engine; one of them, and half of the cases on tables, in the quick tests.
PAIRS = [
    pytest.param(*case, engine, (i + i // 2) % 2 == 1, marks=[pytest.mark.slow] * (i % 2 != j or case[1] in SLOW))
    for i, case in enumerate(CASES)
    for j, engine in enumerate(("processes", "replay"))
]


@pytest.mark.parametrize(("objective", "method", "engine", "table"), PAIRS)
def test_an_engine_equals_inline_bit_for_bit(objective, method, engine, table):
    task = task_of_kind(objective, table=table)
    fields = {"objective": objective, "evaluation__metrics": FIGURES[objective], "task": task}
    expected = tiny_run(method, **fields)
    got = tiny_run(method, engine=engine, workers=2, **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)
    assert figures(got.scores) == figures(expected.scores)
    assert [s.metrics for s in got.scores] == [s.metrics for s in expected.scores]


class Recurrent(nn.Module):
    """A recurrent network, whose layers change the shape of tensors in place."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(1, 6, batch_first=True)
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        return self.fc(self.layer(x[..., None])[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_of_a_user_agree(kind):
    x = np.random.default_rng(0).normal(size=(60, 7))
    fields = {"data": (x, (x[:, -1] > 0).astype(int)), "model": Recurrent(kind), "clients": 3, "partition": "iid"}
    runs = [fedloom.run(**fields, engine=engine, rounds=2) for engine in ("inline", "processes", "replay")]
    outputs = [run.global_model()(x[:5]) for run in runs]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    untrained = fedloom.run(**fields, rounds=1, epochs=0)
    assert not torch.equal(outputs[0], untrained.global_model()(x[:5]))


@pytest.mark.parametrize("objective", ["binary", "multilabel"])
def test_they_learn_with_warmup_clipping_lion_and_patience(objective):
    fields = {
        "training__optimizer": {"name": "lion", "lr": 0.01, "clip": 1.0}, "training__warmup": 2,
        "training__rounds": 8, "training__patience": 3, "evaluation__measure": "auc", "training__fraction": 1.0,
        "evaluation__metrics": FIGURES[objective], "objective": objective,
        "task": with_validation(task_of_kind(objective)),
    }  # fmt: skip
    expected, got = tiny_run("fedavg", **fields), tiny_run("fedavg", engine="replay", **fields)
    assert same_state(got.server.state, expected.server.state)
    assert without_times(got.history) == without_times(expected.history)
    assert expected.history[-1]["personal_auc"] > 0.75


def test_one_logit_and_two_have_the_same_loss_and_probabilities():
    one = objectives.get("binary")
    outputs, y = torch.randn(50, 1), torch.randint(0, 2, (50,))
    both = one.class_logits(outputs)
    assert torch.allclose(both.softmax(1)[:, 1], outputs[:, 0].sigmoid())
    assert torch.allclose(objectives.get("labels").classify(both, y), one.classify(outputs, y))
    assert torch.allclose(one.classify(both, y), one.classify(outputs, y))
    assert one.class_logits(both) is both  # methods with prototypes return two


@pytest.mark.parametrize("kind", ["binary", "multilabel"])
def test_positives_are_weighted_as_in_torch(kind):
    shape = (40, 1) if kind == "binary" else (40, 3)
    outputs, y = torch.randn(shape), torch.randint(0, 2, shape)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))(outputs, y.float())
    labels = y[:, 0] if kind == "binary" else y.to(torch.uint8)
    assert torch.allclose(objectives.get(kind, pos_weight=3.0).classify(outputs, labels), expected)


@pytest.mark.parametrize("method", [m for m in sorted(METHODS) if "multilabel" not in METHODS[m].learns_from])
def test_methods_that_need_one_class_say_so(method):
    assert method in (*ONE_CLASS, "fedstyle")
    with pytest.raises(UserError, match=f"'multilabel': the method {method} cannot be trained on it, because it needs"):
        tiny_run(method, objective="multilabel", task=task_of_kind("multilabel"))


@pytest.mark.parametrize("method", ["fedavg+svm", "fedprox+linear", "fedavg+probe"])
def test_heads_need_one_class(method):
    with pytest.raises(UserError, match="because it needs one class per sample"):
        tiny_run(method, objective="multilabel", task=task_of_kind("multilabel"))


@pytest.mark.parametrize(
    ("objective", "labels", "why"),
    [
        ("labels", "multilabel", "several per sample; use objective.name = multilabel"),
        ("simclr", "multilabel", "needs one class per sample"),
        ("multilabel", "binary", "one class per sample; use objective.name = labels"),
    ],
)
def test_objectives_that_do_not_fit_the_labels_are_refused(objective, labels, why):
    with pytest.raises(UserError, match=why):
        tiny_run("fedavg", objective=objective, task=task_of_kind(labels))


def test_binary_needs_two_classes():
    with pytest.raises(UserError, match="objective.name = 'binary': it needs two classes, but the data have 4"):
        tiny_run("fedavg", objective="binary")


@pytest.mark.parametrize(
    ("objective", "metric", "why"),
    [
        ("multilabel", "balanced_accuracy", "several labels per sample"),
        ("binary", "exact_match", "2 classes"),
        ("labels", "f1", "4 classes"),
    ],
)
def test_figures_that_are_not_defined_are_refused(objective, metric, why):
    task = None if objective == "labels" else task_of_kind(objective)
    with pytest.raises(UserError, match=f"evaluation.metrics = {metric}: it is not defined for data with {why}"):
        tiny_run("fedavg", objective=objective, task=task, evaluation__metrics=[metric])
