"""Accuracy over clients: mean, spread, worst tenth and the figure of a run, against hand-made numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_experiment

from fedloom.core.execution import answers
from fedloom.core.scores import Answers, Scores
from fedloom.core.workspace import Workspace
from fedloom.experiment.summary import pooled, spread, summarise


def scores(right: int, total: int, client: int = 0, loss: float = 0.0) -> Scores:
    return Scores(client, [right, 0], [total, 0], loss)


def test_spread_of_two_clients_in_closed_form() -> None:
    found = spread([scores(1, 2, loss=2.0), scores(9, 10, loss=1.0)])
    assert found == {
        "personal_accuracy": pytest.approx((0.5 + 0.9) / 2),  # clients alike
        "personal_weighted": pytest.approx(10 / 12),  # samples alike
        "personal_std": pytest.approx(0.2),  # of the population: |0.9 − 0.5| / 2
        "personal_worst": 0.5,
        "personal_loss": pytest.approx(3 / 12),
    }


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (25, 2), (30, 3)])
def test_the_worst_tenth_is_the_mean_of_so_many(clients: int, worst: int) -> None:
    order = np.random.default_rng(0).permutation(clients)
    found = spread([scores(int(i), 100, client=int(i)) for i in order])
    assert found["personal_worst"] == pytest.approx((worst - 1) / 2 / 100)  # 0, 1, … worst − 1 right of 100
    assert found["personal_accuracy"] == pytest.approx((clients - 1) / 2 / 100)
    assert found["personal_std"] == pytest.approx(math.sqrt((clients**2 - 1) / 12) / 100)


def test_clients_without_test_samples_say_nothing() -> None:
    assert spread([scores(1, 2), scores(0, 0), scores(1, 2)])["personal_accuracy"] == 0.5
    assert spread([scores(0, 0)]) == {}
    assert spread([]) == {}


def test_the_prefix_names_whom_it_is_about() -> None:
    assert {name.split("_")[0] for name in spread([scores(1, 2)], prefix="newcomer")} == {"newcomer"}


def test_pooled_counts_samples_of_all_classes() -> None:
    assert pooled([Scores(0, [1, 2], [2, 4], 0.0), Scores(1, [0, 3], [1, 3], 0.0)]) == 6 / 10
    assert math.isnan(pooled([]))
    assert math.isnan(pooled([scores(0, 0)]))


def test_accuracy_of_a_client() -> None:
    assert Scores(0, [1, 2], [2, 4], 0.0).accuracy == 0.5
    assert math.isnan(scores(0, 0).accuracy)


VALUES = [0.9, 0.1, 0.4, 0.2, 0.6]


@pytest.mark.parametrize(
    ("rule", "figure"),
    [
        ("last", 0.6),
        ("median:1", 0.6),
        ("median:3", 0.4),
        ("median:4", 0.3),
        ("median:10", 0.4),
        ("mean:2", 0.4),
        ("mean:4", 1.3 / 4),
        ("mean:100", 2.2 / 5),
    ],
)
def test_the_figure_of_a_run_follows_the_rule(rule: str, figure: float) -> None:
    assert summarise(VALUES, rule) == pytest.approx(figure)


def test_answers_are_counted_per_class_and_per_client() -> None:
    answers = Answers(
        labels=torch.tensor([0, 0, 2, 1, 2]),
        right=torch.tensor([True, False, True, True, False]),
        loss=torch.tensor([0.5, 1.5, 0.25, 1.0, 2.0]),
        classes=4,
        clients=(7,),
        sizes=(5,),
    )
    assert answers.scores() == [Scores(7, [1, 1, 1, 0], [2, 1, 2, 0], 5.25)]
    assert replace(answers, clients=(3, 1, 2), sizes=(2, 0, 3)).scores() == [
        Scores(3, [1, 0, 0, 0], [2, 0, 0, 0], 2.0),
        Scores(1, [0, 0, 0, 0], [0, 0, 0, 0], 0.0),
        Scores(2, [0, 1, 1, 0], [0, 1, 2, 0], 3.25),
    ]


def test_a_model_answers_for_all_clients_at_once_as_for_each() -> None:
    workspace = Workspace(tiny_experiment("fedavg").setup)
    workspace.modes.evaluate_only()
    tests = dict(enumerate([*workspace.setup.task.federation.test, np.empty(0, np.int64)]))

    def scored(samples: dict[int, np.ndarray]) -> list[Scores]:
        return answers(workspace, samples, workspace.parts.model).scores()

    together = scored(tests)
    assert [s.client for s in together] == list(tests)
    for got, (client, samples) in zip(together, tests.items(), strict=True):
        (alone,) = scored({client: samples})
        assert (got.right, got.total) == (alone.right, alone.total)
        assert got.loss == pytest.approx(alone.loss, rel=1e-5)
        assert sum(got.total) == len(samples)
