"""Binary and multilabel steps are recorded and batched: clients together end where each of them ends alone."""

from dataclasses import replace

import pytest
from cohorts import LaneEngine, same_run
from tiny import task_of_kind, tiny_run_with_memory

from fedloom.data import Federation
from fedloom.models import Factory

pytestmark = pytest.mark.usefixtures("_no_fallback")


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    ("objective", "method", "table"),
    [
        ("binary", "fedavg", True),
        ("binary", "fedcrc", False),
        ("binary", "fedgh", False),
        pytest.param("binary", "fedproto", True, marks=pytest.mark.slow),
        pytest.param("binary", "fedcrl", False, marks=pytest.mark.slow),
        ("multilabel", "fedavg+ft", False),
        ("multilabel", "moon", True),
        pytest.param("multilabel", "perfedavg", True, marks=pytest.mark.slow),
        pytest.param("multilabel", "scaffold", False, marks=pytest.mark.slow),
    ],
)
def test_clients_together_end_where_each_ends_alone(objective, method, table, slots):
    task = task_of_kind(objective, table=table)
    train = [samples[:size] for samples, size in zip(task.federation.train, (37, 32, 21), strict=False)]
    task = replace(task, federation=Federation(train, task.federation.test[:3]), network=Factory("mlp", {}))
    fields = {
        "task": task, "objective": {"name": objective, "pos_weight": 2.0}, "training__rounds": 2,
        "training__fraction": 1.0, "evaluation__metrics": ["auc", "ece"],
    }  # fmt: skip
    got = tiny_run_with_memory(method, engine="lane-for-tests", workers=slots, **fields)
    same_run(got, tiny_run_with_memory(method, **fields))
    assert LaneEngine.recorder.replays > 1
